//! Predicts the time and memory of training steps on clusters of GPUs that are not at hand.
//!
//! ```text
//! name or cluster file --catalogue--> Machine      config.json --pipewright-shapes--> Model
//! Model, Layout, Machine --stage_time--> seconds of stages --pipeline--> simulated run --predict--> Prediction
//! file of measurements --measured--> Machine with measured rates and times that replace predicted ones
//! Request --search--> the fastest layouts that fit into memory, with their predictions
//! plan --emit--> options of torchtitan, Megatron or DeepSpeed
//! configuration of one of them --judge--> a verdict, next to the best plan
//! file of published runs --published--> runs with their models, layouts and machines
//! ```
//!
//! A time is the operations or bytes of a shape, divided by the product of a data sheet's rate and a constant
//! of the machine ([`machine::Constants`]). The crate never depends on Burn, never
//! opens a file and never measures.

pub mod size_names;
mod layout_error;
pub mod implementation;
pub mod stack_constants;
mod recompute;
pub mod layout;
mod expert_overlap;
pub mod measured_times;
pub mod machine;
pub mod figure;
pub mod machine_json;
mod measured_tables;
pub mod cluster_file;
pub mod catalogue;
pub mod setting;
pub mod accuracy;
pub mod parts;
pub mod product;
pub mod collective;
pub mod attention;
pub mod elementwise;
mod launches;
pub mod stage_time;
mod measured_rates;
mod measured_layer;
pub mod measured;
mod cut;
pub mod memory;
mod units;
pub mod placed;
pub mod pipeline;
pub mod predict;
pub mod goodput;
pub mod systems;
mod published_model;
mod published_layout;
pub mod published;
pub mod search;
mod unwritten;
pub mod emit;
pub mod judge;
