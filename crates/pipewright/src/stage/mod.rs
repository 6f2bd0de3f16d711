//! Stages: the modules that users write, and the operations that the executor runs on them.
//!
//! [`StageModule`] is the typed trait that a user implements. [`Stage`] is such a module without its types. A pipeline
//! prepares it for its rank (`prepare.rs`), which gives it the state of training: the tape of every microbatch in
//! flight, the gradient sums and the optimizer.

mod error;
mod module;
mod body;
mod weight_work;
mod gradients;
mod module_parameters;
mod shards;
mod tape;
mod runner;
mod prepare;
mod training;
mod forward;
mod backward;
mod recompute;
mod compute;
mod parameters;

pub(crate) use backward::BackwardState;
pub(crate) use body::{NO_SKIPS, Skip, Skips, StageBody};
pub use error::StageError;
pub(crate) use forward::ForwardState;
pub(crate) use module::Auxiliary;
pub use module::{StageContext, StageModule};
pub use prepare::Stage;
pub(crate) use prepare::StageSettings;
pub(crate) use runner::{ForwardTask, InputGradients, StageCompute, StageRunner};
pub use weight_work::WeightWork;
