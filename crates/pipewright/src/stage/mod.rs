//! Stages: a user's Burn module, and what the executor does with it.
//!
//! [`StageModule`] is the typed front that a user implements; [`Stage`] is the same thing with its types erased, plus
//! what training needs beside it: the tape of every microbatch in flight, the gradient sums, the optimizer.

mod body;
mod gradients;
mod module;
mod runner;
mod shards;
mod state;
mod training;
mod weights;

pub(crate) use body::{NO_SKIPS, Skip, Skips, StageBody};
pub use module::{StageContext, StageModule};
pub(crate) use runner::{ForwardTask, Runner};
pub use runner::{Stage, StageError};
pub use weights::WeightWork;
