//! Cuts a model's layers into stages: contiguous ranges of layers, at least one layer each.
//!
//! One method a file: `even` (by number of layers), `weighted` (greedy by weight, as the reference cuts),
//! `optimal` (the smallest possible largest stage) and `explicit` (where the user says). Which rank a stage
//! goes to is [`crate::placement`]'s business.
//!
//! ```
//! use pipewright_schedule::{Method, partition};
//! let cut = partition(&[5, 1, 1, 1], 2, &Method::Optimal)?;
//! assert_eq!(cut.weights(&[5, 1, 1, 1]), [5, 3]);
//! # Ok::<(), pipewright_schedule::PartitionError>(())
//! ```

mod error;
mod even;
mod explicit;
mod method;
mod optimal;
mod stages;
mod weighted;

pub use error::PartitionError;
pub use method::{Method, UnknownMethod, partition};
pub use stages::Partition;
