//! The configuration of a run: strict TOML. All mistakes are reported together, each with its place.
//!
//! `keys.toml` is the table of all keys, with the default, the range and a sentence of each: the text that
//! `pipewright init` writes and the page of the configuration come from it. A file and `--set` arguments become a raw
//! document of keys with their places. The file of each section reads its keys through a reader of its section,
//! which records mistakes and continues. The result is [`Settings`], which is not checked again later.
//!
//! A schedule by name is checked and not generated, and the rows of a schedule's file are read once.
//! `training/prepare.rs` makes the program and checks what needs other files.

pub mod adapter;
pub mod checkpoints;
pub(crate) mod cross_checks;
pub mod data;
mod devices;
mod document;
pub mod generator;
mod keys;
mod load;
pub mod mesh;
mod mix;
pub mod model;
pub mod offload;
pub mod optimizer;
pub mod optimizer_groups;
mod page;
mod paths;
pub mod pipeline;
pub mod preference;
pub mod profile;
pub mod replan;
pub mod run;
pub mod sample;
mod schedule;
mod section;
#[cfg(test)]
mod tests;
mod whole;

#[cfg(test)]
pub(crate) use keys::kept_marks;
pub(crate) use keys::may_differ;
pub use keys::{set_arguments, template};
pub use load::{Base, Loaded, Scheduled};
pub use page::page;
pub use paths::Surroundings;
pub use pipewright_system::config_file::ConfigError;
pub use whole::Settings;
