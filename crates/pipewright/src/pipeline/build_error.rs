//! Why a builder does not launch a pipeline.

use pipewright_schedule::lower::SourceError;
use pipewright_schedule::words::counted;
use pipewright_schedule::{GenerateError, LowerError, PartitionError, Violations};

use super::error::PipelineError;
use crate::graph::GraphError;

/// Why a [`PipelineBuilder`](super::PipelineBuilder) does not launch a pipeline.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The model has no layers.
    #[error("the model has no layers: a pipeline needs at least one for each stage")]
    NoLayers,
    /// The number of weights differs from the number of layers.
    #[error("{weights} weights are given for {layers} layers: give one for each (`Layers::with_weights`)")]
    Weights {
        /// The number of weights.
        weights: usize,
        /// The number of layers of the model.
        layers: usize,
    },
    /// A layer takes other tensors than the layer before it returns.
    #[error(
        "layer {layer} returns {returns}, and the next layer takes {takes}: layers that follow each other have one type \
         between them (`StageModule::Output`, `StageModule::Input`)"
    )]
    Neighbours {
        /// The layer, counted from 0.
        layer: usize,
        /// The type that it returns.
        returns: String,
        /// The type that the next layer takes.
        takes: String,
    },
    /// The loss takes other tensors than the last layer returns.
    #[error("layer {layer}, the last one, returns {returns}, and the loss takes {takes}")]
    LossType {
        /// The last layer, counted from 0.
        layer: usize,
        /// The type that it returns.
        returns: String,
        /// The type that the loss takes.
        takes: String,
    },
    /// The number of replicas is 0.
    #[error("0 replicas of the pipeline have nothing to run: `data_parallel` needs at least 1")]
    NoReplicas,
    /// Replicas cannot share the microbatches equally.
    #[error(
        "{} cannot be shared equally by {replicas} replicas: {}", counted(*.microbatches, "microbatch"), shared_by(.shared)
    )]
    Microbatches {
        /// The number of microbatches of a step.
        microbatches: u32,
        /// The number of replicas of the pipeline.
        replicas: u32,
        /// The nearest numbers that the replicas can share and the schedule accepts.
        shared: Vec<u32>,
    },
    /// The schedule has another size than the builder was asked for.
    #[error("the schedule has {found} {what}, and the builder was asked for {asked}: leave `{what}` out")]
    Size {
        /// The builder's method.
        what: &'static str,
        /// Its argument.
        asked: u32,
        /// The size of the schedule.
        found: u32,
    },
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
    /// The schedule trains, but there is no loss.
    #[error(
        "the schedule trains, and there is no loss: give one with `loss`, or use the schedule `forwardonly`"
    )]
    NoLoss,
    /// The schedule trains, but there is no optimizer.
    #[error(
        "the schedule trains, and there is no optimizer: give one with `optimizer`, or use the schedule `forwardonly`"
    )]
    NoOptimizer,
    /// The pipeline does not start.
    #[error(transparent)]
    Launch(#[from] PipelineError),
}

pipewright_schedule::message_as_debug!(BuildError);

/// Returns what to do if replicas cannot share the microbatches.
fn shared_by(shared: &[u32]) -> String {
    let numbers: Vec<String> = shared.iter().map(u32::to_string).collect();
    if numbers.is_empty() {
        "use another number of replicas".to_owned()
    } else {
        format!("use {}", numbers.join(" or "))
    }
}

impl From<SourceError> for BuildError {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::Generate(error) => Self::Schedule(error),
            SourceError::Lower(LowerError::Invalid(violations)) => Self::Unsound(Box::new(violations)),
            SourceError::Lower(error) => Self::Lower(error),
        }
    }
}
