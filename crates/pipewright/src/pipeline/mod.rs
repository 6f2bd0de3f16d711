//! A running pipeline: ranks with their stages, and the steps they are asked to take.
//!
//! [`Pipeline::builder`] goes from layers to a running pipeline, and chooses what is not said. [`Pipeline::launch`] is
//! told everything: it starts a thread for each rank of this process and makes its stages there. From then on the
//! pipeline hands each rank its part of a step, waits for all answers, and puts them together in a summary.

mod config;
mod error;
mod assembly;
mod summary;
mod running;
mod replies;
mod layers;
mod build_error;
mod schedule_source;
mod builder;
#[cfg(feature = "testing")]
mod seeded;

pub use crate::executor::NamedParameter;
pub use build_error::BuildError;
pub use builder::PipelineBuilder;
pub use config::PipelineConfig;
pub use error::PipelineError;
pub use layers::Layers;
pub use running::Pipeline;
pub use schedule_source::ScheduleSource;
#[cfg(feature = "testing")]
pub use seeded::SeededPipeline;
pub use summary::{EvalSummary, StepSummary};
