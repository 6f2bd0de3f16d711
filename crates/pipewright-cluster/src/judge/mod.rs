//! Judges a configuration of another system on a machine: whether it fits, how long a step takes, and what is better.
//!
//! ```text
//! script, YAML, TOML, JSON --Configuration::parse--> options with lines --run--> GivenRun (a layout)
//! Request, Layout --judge--> Judgement (its plan, the best plan, and the options that differ)
//! ```
//!
//! Nothing here opens a file or runs a script.

mod document;
mod given_run;
mod taken;
mod megatron;
mod torchtitan;
mod deepspeed;
mod configuration;
mod judgement;

pub use configuration::Configuration;
pub use given_run::{GivenRun, RunContext};
pub use judgement::{ChangedOption, Judgement, judge};
