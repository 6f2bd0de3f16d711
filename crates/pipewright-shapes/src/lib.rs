//! The shape of a model, from its `config.json` alone.
//!
//! ```text
//!                         family, key_table: the keys of each family, and what files leave out
//!                              |                                     |
//! config.json --decoder, nemotron_h, hybrid--> configuration --> the modules of training
//! config.json --reader--> Model: blocks, matrices, biases and norms --operations--> parameters and operations
//!                                                                         --kept--> numbers for the backward
//! ```
//!
//! A configuration has all constants of the computation and refuses what training cannot compute. A
//! [`Model`](model::Model) has the sizes that costs depend on. It is read of more families. Both take the keys and the
//! missing values of a family from its row in [`family`], and refuse keys that may change what they do not know.
//!
//! The crate never depends on Burn, never opens a file and knows no times.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

// Reading order: a module imports only earlier ones, which `tools/layers` checks.
pub mod error;
pub mod key_range;
pub mod key_table;
pub mod vectors;
pub mod family;
pub mod decoder;
pub mod nemotron_h;
pub mod hybrid;
pub mod matrix;
pub mod training;
pub mod delta;
pub mod model;
pub mod operations;
pub mod kept;
pub mod reader;

pub use error::ShapeError;
pub use reader::{Described, MAX_FILE, read};
