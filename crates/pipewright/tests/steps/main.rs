//! What a step computes, and the state that it leaves.

mod element_types;
mod training;
mod steps;
mod batches;
mod batch_forms;
mod boundaries;
mod evaluation;
mod gradients;
mod updates;
mod randomness;
mod recompute;
mod slices;
mod precision;
mod checkpoints;
mod run_log;
#[path = "../support/mod.rs"]
mod support;
