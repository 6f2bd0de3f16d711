//! Cuts a model's layers into stages: contiguous ranges of layers, at least one layer each.
//!
//! The methods are `even` (by number of layers), `weighted` (greedy by weight, as in PyTorch's reference),
//! `optimal` (the heaviest stage as light as possible), `explicit` (at given layers) and `blocks` (by number of
//! blocks, with the embedding on the first stage and the head on the last).
//! [`Layout`] reads a cut that is written by hand.
//! [`crate::placement`] decides the rank of each stage.
//!
//! ```
//! use pipewright_schedule::{Method, partition};
//! let cut = partition(&[5, 1, 1, 1], 2, &Method::Optimal)?;
//! assert_eq!(cut.weights(&[5, 1, 1, 1]), [5, 3]);
//! # Ok::<(), pipewright_schedule::PartitionError>(())
//! ```

mod layout;
mod method;
mod optimal;
mod stages;
mod weighted;

pub use layout::{Layout, LayoutError, MAX_LAYOUT_LAYERS};
pub use method::{Method, PartitionError, UnknownMethod, partition};
pub use stages::Partition;
