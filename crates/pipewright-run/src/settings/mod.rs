//! The configuration of a run: strict TOML. All mistakes are reported together, each with its place.
//!
//! A file and `--set` arguments become a raw [`document`] of keys with their places. The file of each section
//! reads its keys through a [`section`] reader, which records mistakes and continues. The result is
//! [`Settings`], which is not checked again later.
//!
//! A schedule by name is checked and not generated, and the rows of a schedule's file are read once.
//! `training/prepare.rs` makes the program and checks what needs other files.

pub mod adapter;
pub mod checkpoints;
mod cross_checks;
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
mod paths;
pub mod pipeline;
mod place;
mod problem;
pub mod profile;
mod profile_keys;
pub mod run;
pub mod sample;
mod schedule;
mod section;
#[cfg(test)]
mod tests;
mod whole;

pub use keys::nearest;
pub use load::{Base, Loaded, Scheduled};
pub use paths::Surroundings;
pub use problem::{ConfigError, Problem};
pub use whole::Settings;

/// A configuration with every key at its default and a comment on each.
pub const TEMPLATE: &str = include_str!("template.toml");
