//! The configuration of a run: strict TOML. All mistakes are reported together, each with its place.
//!
//! A file and `--set` arguments become a raw [`document`] of keys with their places. The file of each section
//! reads its keys through a [`section`] reader, which records mistakes and continues. The result is
//! [`Settings`], which is not checked again later.
//!
//! A schedule by name is checked and not generated, and the rows of a schedule's file are read once.
//! `training/prepare.rs` makes the program and checks what needs other files.

pub(crate) mod adapter;
pub(crate) mod checkpoints;
mod cross_checks;
pub(crate) mod data;
mod devices;
mod document;
pub(crate) mod generator;
mod keys;
mod load;
pub(crate) mod mesh;
mod mix;
pub(crate) mod model;
pub(crate) mod offload;
pub(crate) mod optimizer;
pub(crate) mod optimizer_groups;
mod paths;
pub(crate) mod pipeline;
mod place;
mod problem;
pub(crate) mod profile;
mod profile_keys;
pub(crate) mod run;
pub(crate) mod sample;
mod schedule;
mod section;
mod settings;
#[cfg(test)]
mod tests;

pub(crate) use keys::nearest;
pub(crate) use load::{Base, Loaded, Scheduled};
pub(crate) use paths::Surroundings;
pub(crate) use problem::{ConfigError, Problem};
pub(crate) use settings::Settings;

/// A configuration with every key at its default and a comment on each.
pub(crate) const TEMPLATE: &str = include_str!("template.toml");
