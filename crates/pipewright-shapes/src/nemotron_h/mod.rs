//! The keys of Nemotron-H.

mod config;
mod json;

pub use config::{BlockKind, Experts, NemotronHConfig};
