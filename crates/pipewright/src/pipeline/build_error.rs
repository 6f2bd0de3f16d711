//! Why a builder does not launch a pipeline.

use pipewright_schedule::lower::SourceError;
use pipewright_schedule::{GenerateError, LowerError, PartitionError, Violations};

use super::error::PipelineError;
use crate::graph::GraphError;

/// Why a [`PipelineBuilder`](super::PipelineBuilder) does not launch a pipeline.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The settings are incomplete or do not fit together.
    #[error("{0}")]
    Settings(String),
    /// The schedule does not exist, or does not exist at this size.
    #[error("the schedule cannot be made: {0}")]
    Schedule(#[source] GenerateError),
    /// The schedule cannot be lowered.
    #[error("the schedule cannot be lowered: {0}")]
    Lower(#[source] LowerError),
    /// The lowered schedule is unsound.
    #[error("the schedule cannot be run: {0}")]
    Unsound(#[source] Box<Violations>),
    /// The layers cannot be cut into stages.
    #[error("the layers cannot be cut into stages: {0}")]
    Partition(#[source] PartitionError),
    /// The graph does not fit the schedule's stages.
    #[error("the graph cannot be cut into stages: {0}")]
    Graph(#[source] GraphError),
    /// The pipeline does not start.
    #[error(transparent)]
    Launch(#[from] PipelineError),
}

pipewright_schedule::message_as_debug!(BuildError);

impl From<SourceError> for BuildError {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::Generate(error) => Self::Schedule(error),
            SourceError::Lower(LowerError::Invalid(violations)) => Self::Unsound(Box::new(violations)),
            SourceError::Lower(error) => Self::Lower(error),
        }
    }
}
