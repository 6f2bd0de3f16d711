//! A running pipeline: ranks with their stages, and the steps they are asked to take.
//!
//! [`Pipeline::launch`] starts a thread for each rank of this process and makes its stages there. From then on the
//! pipeline hands each rank its part of a step, waits for all answers, and puts them together in a summary.

mod config;
mod error;
mod assembly;
mod summary;
mod running;
mod replies;
#[cfg(feature = "testing")]
mod seeded;

pub use crate::executor::NamedParameter;
pub use config::PipelineConfig;
pub use error::PipelineError;
pub use running::Pipeline;
#[cfg(feature = "testing")]
pub use seeded::SeededPipeline;
pub use summary::{EvalSummary, StepSummary};
