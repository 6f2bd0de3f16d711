//! Failures of a step: their causes, and the flag that stops all ranks.
//!
//! All ranks share one [`Abort`] flag. A rank that fails raises it with the cause; the others find it raised
//! at their next wait or action and stop. The first cause is kept, and the caller gets that cause, never a
//! consequence of it.

mod abort;
mod step_error;
mod cause;
mod origin;
mod update_failure;

pub use abort::Abort;
pub(crate) use abort::Divergence;
#[cfg(any(feature = "mpi", test))]
pub(crate) use abort::FailureNotice;
pub use cause::Cause;
pub use origin::{FirstNotFinite, NotFiniteOrigin};
pub use step_error::StepError;
pub use update_failure::UpdateFailure;
