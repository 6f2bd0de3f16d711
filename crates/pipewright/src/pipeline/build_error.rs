//! Why a builder does not launch a pipeline.

use pipewright_schedule::{GenerateError, LowerError, PartitionError, Violations};

use super::error::PipelineError;
use crate::graph::GraphError;

/// Why a [`PipelineBuilder`](super::PipelineBuilder) does not launch a pipeline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A model without layers.
    #[error("the model has no layers: a pipeline needs at least one for each stage")]
    NoLayers,
    /// Weights for another number of layers.
    #[error("{weights} weights are given for {layers} layers: give one for each (`Layers::with_weights`)")]
    Weights {
        /// Weights given.
        weights: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// No replica of the pipeline.
    #[error("0 replicas of the pipeline have nothing to run: `data_parallel` needs at least 1")]
    NoReplicas,
    /// Microbatches that replicas cannot share equally.
    #[error(
        "{microbatches} microbatches cannot be shared equally by {replicas} replicas: use a multiple of {replicas}"
    )]
    Microbatches {
        /// Microbatches of a step.
        microbatches: u32,
        /// Replicas of the pipeline.
        replicas: u32,
    },
    /// A schedule of another size than was asked for.
    #[error("the schedule has {found} {what}, and the builder was asked for {asked}: leave `{what}` out")]
    Size {
        /// The builder's method.
        what: &'static str,
        /// Its argument.
        asked: u32,
        /// What the schedule has.
        found: u32,
    },
    /// The schedule does not exist, or not at this size.
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
    /// Training without a loss.
    #[error(
        "the schedule trains, and there is no loss: give one with `loss`, or use the schedule `forwardonly`"
    )]
    NoLoss,
    /// Training without an optimizer.
    #[error(
        "the schedule trains, and there is no optimizer: give one with `optimizer`, or use the schedule `forwardonly`"
    )]
    NoOptimizer,
    /// The pipeline does not start.
    #[error(transparent)]
    Launch(#[from] PipelineError),
}
