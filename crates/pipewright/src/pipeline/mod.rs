//! A running pipeline: the ranks with their stages, and the steps that they take.
//!
//! [`Pipeline::builder`] makes a running pipeline from layers and chooses the settings that the caller leaves out.
//! [`Pipeline::launch`] takes all settings: it starts a thread for each rank of this process and makes its stages
//! there. In each step the pipeline then sends each rank its part of the batch, waits for all answers, and
//! merges them into a summary.

mod error;
mod setup;
mod step_plan;
mod step_gap;
mod summary;
mod verified_step;
mod step_failure;
mod accumulation;
mod ranks;
mod answers;
mod report_link;
mod begun;
mod running;
mod not_finite_search;
mod offers;
mod training_step;
mod launch;
mod state;
mod modules;
mod moves;
mod build_error;
mod layer_list;
mod layers;
mod schedule_source;
mod program_request;
mod builder;
mod builder_settings;
mod replayed_ranks;
mod replay;
#[cfg(feature = "testing")]
mod seeded;

pub use crate::config::PipelineConfig;
pub use crate::executor::{ExchangeTime, MovedLayers, NamedParameter, UndeferredParameter};
pub(crate) use begun::Begin;
pub use build_error::BuildError;
pub use builder::PipelineBuilder;
pub use error::{Mistake, PipelineError};
pub use layer_list::LayerList;
pub use layers::Layers;
pub use replay::{ReplayedBatches, ReplayedStage, StepReplay};
pub use running::Pipeline;
pub(crate) use running::{split_whole, unsplit};
pub use schedule_source::ScheduleSource;
#[cfg(feature = "testing")]
pub use seeded::SeededPipeline;
pub use step_failure::StepFailure;
pub use step_gap::StepGap;
pub(crate) use step_gap::first_action;
pub use summary::{EvalSummary, StepSummary, Unmatched};
