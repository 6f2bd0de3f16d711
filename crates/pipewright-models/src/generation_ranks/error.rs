//! Why ranks cannot generate texts.

use std::fmt;

use pipewright::failure::{Cause, StepError};
use pipewright_schedule::error_text::with_causes;
use serde::{Deserialize, Serialize};
use thiserror::Error;

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
    /// The ranks do not fit together, or a rank of this process or of another one failed.
    #[error("{0}")]
    Failed(RankFailure),
    /// A process is lost, or a rank failed and its process has not said why.
    #[error("the ranks cannot continue")]
    Lost(#[source] Box<StepError>),
    /// An earlier call has failed, and its ranks have ended.
    #[error("the ranks have ended after a failure: start them again")]
    Ended,
}

pipewright_schedule::message_as_debug!(RanksError);

/// The failure of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankFailure {
    /// The rank; `None` if no rank alone is the reason.
    pub rank: Option<usize>,
    /// What failed, with the rank and all causes.
    pub message: String,
    /// Whether the stage cannot be made, because the model or its files are wrong.
    pub is_of_model: bool,
    /// The cause that the other ranks get; `None` if it is the message.
    #[serde(skip)]
    pub(super) cause: Option<Cause>,
}

impl RankFailure {
    /// Returns a failure that no rank alone is the reason of.
    pub(super) fn of_all(message: String) -> Self {
        Self { rank: None, message, is_of_model: false, cause: None }
    }

    /// Returns the failure of a rank. The message names the rank.
    pub(super) fn of(rank: usize, message: String) -> Self {
        Self { rank: Some(rank), ..Self::of_all(message) }
    }

    /// Sets the cause that the other ranks get.
    pub(super) fn with_cause(self, cause: Cause) -> Self {
        Self { cause: Some(cause), ..self }
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<RankFailure> for RanksError {
    fn from(failure: RankFailure) -> Self {
        Self::Failed(failure)
    }
}

impl From<RanksError> for RankFailure {
    fn from(error: RanksError) -> Self {
        let message = with_causes(&error);
        match error {
            RanksError::Failed(failure) => failure,
            RanksError::Lost(error) => Self::of(error.rank.index(), message).with_cause(error.cause),
            RanksError::Request { .. } | RanksError::Ended => Self::of_all(message),
        }
    }
}

impl RanksError {
    /// Returns the rank that failed; `None` if no rank alone is the reason.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Failed(failure) => failure.rank,
            Self::Lost(error) => Some(error.rank.index()),
            Self::Request { .. } | Self::Ended => None,
        }
    }

    /// Returns the cause that the other ranks get.
    pub(super) fn cause(&self) -> Cause {
        let known = match self {
            Self::Failed(failure) => failure.cause.clone(),
            Self::Lost(error) => Some(error.cause.clone()),
            Self::Request { .. } | Self::Ended => None,
        };
        // The text names the rank and the reason.
        known.unwrap_or_else(|| Cause::Remote { message: with_causes(self) })
    }

    /// Returns whether a stage cannot be made, because the model or its files are wrong.
    pub fn is_of_model(&self) -> bool {
        matches!(self, Self::Failed(failure) if failure.is_of_model)
    }
}
