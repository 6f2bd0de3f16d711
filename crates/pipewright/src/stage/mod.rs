//! Stages: the modules that users write, and the operations that the executor runs on them.
//!
//! [`StageModule`] is the typed trait that a user implements. [`Stage`] is such a module without its types, together
//! with the state of training: the tape of every microbatch in flight, the gradient sums and the optimizer.

mod body;
mod gradients;
mod module;
mod runner;
mod shards;
mod state;
mod training;
mod weights;

pub(crate) use body::{NO_SKIPS, Skip, Skips, StageBody};
pub(crate) use module::Auxiliary;
pub use module::{StageContext, StageModule};
pub(crate) use runner::{ForwardTask, Runner};
pub use runner::{Stage, StageError};
pub use weights::WeightWork;
