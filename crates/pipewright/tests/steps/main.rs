//! The results of steps, and the state that they leave.

mod element_types;
mod training;
mod steps;
mod ahead;
mod post_validation;
mod batches;
mod batch_forms;
mod boundaries;
mod messages;
mod evaluation;
mod gradients;
mod updates;
mod replay;
mod delayed;
mod randomness;
mod recompute;
mod offload;
mod slices;
mod precision;
mod checkpoints;
mod run_log;
mod trainer;
mod moves;
#[path = "../support/mod.rs"]
mod support;
