//! Moves the tensors that forwards keep for their backwards out of memory, and brings them back: the actions `OFFLOAD`
//! and `RELOAD`.
//!
//! A forward that is computed again keeps its inputs, and nothing on a tape
//! ([`PipelineConfig::recompute`](crate::pipeline::PipelineConfig::recompute)). Only these tensors can leave: the tape of
//! any other forward belongs to Burn. They come back with the same bits. Tensors of integers stay, such as token ids,
//! which the batch holds anyway.
//!
//! Each rank has a thread that moves its tensors one microbatch after another (`mover.rs`), so the rank computes
//! meanwhile. A backward waits for its tensors, at most the deadline of any other wait.

mod place;
mod error;
mod scratch;
mod kept;
mod mover;
mod offloads;

pub use error::{OffloadError, OffloadErrorKind};
pub(crate) use offloads::{Offloads, Reloaded, Transfer};
pub use place::OffloadTo;
