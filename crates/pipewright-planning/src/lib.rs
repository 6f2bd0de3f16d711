//! The commands that need no training: they print, lower, prove, simulate, compare and plan schedules.
//!
//! The binary `pipewright` and the Python package (`python -m pipewright_pp`) run them, so the crate has what both show to
//! people: messages, reports of failures, and files. It does not depend on Burn. A configuration for training can be read only
//! by the binary, which gives its reader to [`Command::run`] as [`Configurations`].

pub mod numbers;
mod wrap;
pub mod screen;
pub mod failure;
pub mod panic;
mod browser;
pub mod output;
pub mod argument_values;
pub mod schedules;
pub mod configurations;
pub mod plans;
pub mod clusters;
mod commands;
mod command;

pub use command::Command;
pub use configurations::Configurations;
