//! The keys of this project's hybrids.

mod config;
mod pattern;
mod validate;

pub use config::{EmbedNorm, HybridConfig};
pub use pattern::{BlockKind, Pattern};
pub use validate::STRUCTURES;
