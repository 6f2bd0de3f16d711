//! Why ranks cannot generate texts.

use std::ops::Range;
use std::time::Duration;

use pipewright::failure::{Cause, StepError};
use pipewright::stage::StageError;
use pipewright::tensor::BoundaryError;
use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::words::counted;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::error::ModelError;
use crate::generation::GenerateError;

/// Why ranks cannot generate texts.
#[derive(Error)]
#[non_exhaustive]
pub enum RanksError {
    /// A request cannot be fulfilled.
    #[error("request {index}")]
    Request {
        /// The index of the request.
        index: usize,
        /// The reason.
        source: GenerateError,
    },
    /// A stage cannot be made.
    #[error("rank {rank}: the layers from {} up to, but not including, {} cannot be loaded", layers.start, layers.end)]
    Stage {
        /// The rank.
        rank: usize,
        /// The layers of the stage.
        layers: Range<usize>,
        /// The reason.
        source: Box<ModelError>,
    },
    /// The last stage does not have the model's head.
    #[error("rank {rank}: the last stage does not have the head of the model: give it the last layers")]
    NoHead {
        /// The rank.
        rank: usize,
    },
    /// A stage does not take the result of the previous rank.
    #[error("rank {rank}: the stage does not take the result of the previous rank")]
    Boundary {
        /// The rank.
        rank: usize,
        /// The reason.
        source: BoundaryError,
    },
    /// The code of a stage panicked.
    #[error("rank {rank} panicked: {message}")]
    Panic {
        /// The rank.
        rank: usize,
        /// The message.
        message: String,
    },
    /// A rank did not get what another rank should have sent.
    #[error("rank {rank}")]
    Exchange {
        /// The rank.
        rank: usize,
        /// The reason.
        source: Cause,
    },
    /// No rank made progress within the deadline.
    #[error(
        "no rank has made progress for {} s, and {}: give a longer deadline, or find out what blocks the device",
        deadline.as_secs_f64(),
        busy_ranks(busy)
    )]
    Silent {
        /// The deadline.
        deadline: Duration,
        /// The ranks that are computing.
        busy: Vec<usize>,
    },
    /// A thread cannot be started.
    #[error("the thread of rank {rank} cannot be started")]
    Thread {
        /// The rank.
        rank: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The world has another number of ranks.
    #[error("the world has {}, and the model is distributed over {}: make them equal", counted(*.found, "rank"), .expected)]
    Count {
        /// The ranks of the world.
        found: usize,
        /// The ranks with a stage.
        expected: usize,
    },
    /// The number of ranks is not a multiple of the tensor ranks of a stage.
    #[error("{} are not a multiple of {}: give each stage as many", counted(*.ranks, "rank"), counted(*.tensor, "tensor rank"))]
    TensorRanks {
        /// The ranks with a stage.
        ranks: usize,
        /// The ranks that compute a stage together.
        tensor: usize,
    },
    /// A rank of another process failed.
    #[error("{0}")]
    Elsewhere(RemoteFailure),
    /// A process is lost, or a rank failed and its process has not said why.
    #[error("the ranks cannot continue")]
    Lost(#[source] Box<StepError>),
    /// An earlier call has failed, and its ranks have ended.
    #[error("the ranks have ended after a failure: start them again")]
    Ended,
}

pipewright_schedule::message_as_debug!(RanksError);

/// The failure of a rank of another process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RemoteFailure {
    /// The rank; `None` if no rank alone is the reason.
    pub rank: Option<usize>,
    /// What failed, with the rank and all causes.
    pub message: String,
    /// Whether the stage cannot be made, because the model or its files are wrong.
    pub is_of_model: bool,
}

impl From<&RanksError> for RemoteFailure {
    fn from(error: &RanksError) -> Self {
        Self { rank: error.rank(), message: with_causes(error), is_of_model: error.is_of_model() }
    }
}

impl std::fmt::Display for RemoteFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

fn busy_ranks(busy: &[usize]) -> String {
    let names: Vec<String> = busy.iter().map(ToString::to_string).collect();
    match names.as_slice() {
        [] => "none computes".to_owned(),
        [rank] => format!("rank {rank} still computes"),
        _ => format!("ranks {} still compute", names.join(", ")),
    }
}

impl RanksError {
    /// Returns the rank that failed; `None` if no rank alone is the reason.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Stage { rank, .. }
            | Self::NoHead { rank }
            | Self::Boundary { rank, .. }
            | Self::Panic { rank, .. }
            | Self::Exchange { rank, .. }
            | Self::Thread { rank, .. } => Some(*rank),
            Self::Elsewhere(failure) => failure.rank,
            Self::Lost(error) => Some(error.rank.index()),
            Self::Request { .. }
            | Self::Silent { .. }
            | Self::Count { .. }
            | Self::TensorRanks { .. }
            | Self::Ended => None,
        }
    }

    /// Returns the cause that the other ranks get.
    pub(super) fn cause(&self) -> Cause {
        match self {
            Self::Stage { source, .. } => Cause::Build { message: with_causes(&**source) },
            Self::Boundary { source, .. } => Cause::Stage(StageError::Input(source.clone())),
            Self::NoHead { .. } => Cause::Build { message: self.to_string() },
            Self::Panic { message, .. } => Cause::Panic { message: message.clone() },
            Self::Exchange { source, .. } => source.clone(),
            Self::Lost(error) => error.cause.clone(),
            Self::Silent { deadline, busy } => {
                Cause::Deadline { waited: *deadline, report: busy_ranks(busy) }
            }
            // Its text names the rank and the reason.
            error => Cause::Remote { message: with_causes(error) },
        }
    }

    /// Returns whether a stage cannot be made, because the model or its files are wrong.
    pub fn is_of_model(&self) -> bool {
        match self {
            Self::Stage { .. } => true,
            Self::Elsewhere(failure) => failure.is_of_model,
            _ => false,
        }
    }
}
