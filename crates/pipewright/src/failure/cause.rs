//! [`Cause`]: why a rank failed.

use std::sync::Arc;
use std::time::Duration;

use pipewright_schedule::error_text::panic_message;
use pipewright_schedule::{Microbatch, StageIndex};

use super::origin::NotFiniteOrigin;
use super::update_failure::{UpdateFailure, device_memory};
use crate::checkpoint::{CheckpointError, NotFinite};
use crate::ids::WorldRank;
use crate::message::MessageError;
use crate::stage::StageError;
use crate::tensor::MetadataError;
use crate::verification::{Difference, Suspicion};

/// Why a rank failed.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The stage's code or a hook panicked.
    #[error("the stage panicked: {message}")]
    Panic {
        /// The message.
        message: String,
    },
    /// The rank's device has no memory left, maybe since an earlier action: it computes behind its rank.
    #[error("the device has no memory left: {bytes} bytes were asked for")]
    DeviceMemory {
        /// The bytes that were asked for.
        bytes: u64,
    },
    /// The rank's device failed in some action of the program, which the rank noticed after it.
    #[error(
        "the device failed: {message}; it computes behind its rank, so an earlier action may be the cause"
    )]
    Device {
        /// The back end's message.
        message: String,
    },
    /// The stages do not fit each other, or a function of a hook leaves something out.
    #[error("{0}")]
    Mistake(String),
    /// The update of a stage's parameters failed. Other parameters may have been updated.
    #[error("{failure}")]
    Update {
        /// The stage.
        stage: StageIndex,
        /// Why it failed.
        failure: UpdateFailure,
    },
    /// The stage does not take the tensors that arrived.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// A stage sent tensors that the next stage does not expect.
    #[error(transparent)]
    Metadata(#[from] Box<MetadataError>),
    /// A message of another rank cannot be used.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The tensors of a forward could not leave memory, or did not come back.
    #[error(transparent)]
    Offload(#[from] Arc<crate::offload::OffloadError>),
    /// The frozen matrices of a stage could not be read from their file.
    #[error(transparent)]
    Stream(#[from] Arc<crate::stream::StreamError>),
    /// The stage could not be made.
    #[error("the stage cannot be made: {message}")]
    Build {
        /// The message of the code that makes it.
        message: String,
    },
    /// A checkpoint could not be restored.
    #[error("stage {stage}: {error}")]
    Restore {
        /// The stage.
        stage: StageIndex,
        /// The cause.
        #[source]
        error: Arc<CheckpointError>,
    },
    /// A microbatch's loss is infinite or not a number. The parameters are those before the step.
    #[error(
        "the loss of microbatch {microbatch} is {loss}; the parameters are still those before this step: lower the \
         learning rate, clip gradients, or look at the data of this step"
    )]
    LossNotFinite {
        /// The first such microbatch.
        microbatch: Microbatch,
        /// Its loss.
        loss: f64,
    },
    /// An auxiliary loss is infinite or not a number. The parameters are those before the step.
    #[error(
        "the auxiliary loss `{name}` of stage {stage} and microbatch {microbatch} is {loss}; the parameters are still \
         those before this step"
    )]
    AuxiliaryNotFinite {
        /// The stage that computed it.
        stage: StageIndex,
        /// The first such microbatch.
        microbatch: Microbatch,
        /// Its name.
        name: Arc<str>,
        /// Its value.
        loss: f64,
    },
    /// A parameter's gradient is infinite or not a number. The parameters are those before the step.
    #[error(
        "the gradient of `{parameter}` is not finite; the parameters are still those before this step: lower the \
         learning rate, or look at the data of this step"
    )]
    GradientNotFinite {
        /// The first such parameter, by path.
        parameter: Arc<str>,
    },
    /// A loss or gradient is not finite because a parameter is not. The parameters are those before the step.
    #[error(
        "the parameter `{parameter}` has {found} since an earlier step, whose update has ruined it: lower the learning rate or \
         the weight decay, or clip gradients, and start again from a checkpoint before that step"
    )]
    ParameterNotFinite {
        /// The first such parameter of the rank.
        parameter: Arc<str>,
        /// Its elements that are not finite.
        found: NotFinite,
    },
    /// A number is not finite, and the step was computed again to find the first one. The parameters are those
    /// before the step.
    #[error("{cause}; {origin}")]
    Located {
        /// Why the step failed.
        cause: Box<Self>,
        /// The first value that is not finite.
        origin: Box<NotFiniteOrigin>,
    },
    /// The end of a step that is computed again to find the first value that is not finite. Only the pipeline sees
    /// this cause; the caller gets [`Cause::Located`].
    #[error("{origin}")]
    Search {
        /// The result.
        origin: Box<NotFiniteOrigin>,
    },
    /// A number of another process is not finite.
    #[error("{message}")]
    RemoteNumber {
        /// The other process's message.
        message: String,
    },
    /// The step is to be computed again, because a result is suspicious
    /// ([`Verify::OnSuspicion`](crate::verification::Verify)). The parameters are those before the step.
    #[error("{suspicion}, so the step is computed again")]
    Suspicious {
        /// The reason.
        suspicion: Suspicion,
    },
    /// Repetitions of a suspicious step differ, and the right bits are not known. Parameters have not changed.
    #[error(
        "{difference}; the parameters are still those before this step: {}", difference.advice()
    )]
    Unconfirmed {
        /// The first result that differs, and the ranks that have computed it.
        difference: Box<Difference>,
    },
    /// No rank made progress for the whole deadline.
    #[error("no rank has moved for {:.1} s\n{report}", .waited.as_secs_f64())]
    Deadline {
        /// The deadline.
        waited: Duration,
        /// One line per rank: its last actions and what it waits for.
        report: String,
    },
    /// A rank's process sends no heartbeats.
    #[error(
        "rank {peer} has sent no heartbeat for {:.1} s: its process has ended, is stopped, or cannot be reached\n{report}",
        .waited.as_secs_f64()
    )]
    SilentPeer {
        /// The rank.
        peer: WorldRank,
        /// The deadline.
        waited: Duration,
        /// As in [`Cause::Deadline`].
        report: String,
    },
    /// The transport failed.
    #[error("the transport failed: {message}")]
    Transport {
        /// The message.
        message: String,
    },
    /// A failure that another process reported.
    #[error("{message}")]
    Remote {
        /// The other process's message.
        message: String,
    },
    /// A rank's thread or process has ended.
    #[error("rank {peer} is lost: its thread or process has ended")]
    LostPeer {
        /// The rank that has ended.
        peer: WorldRank,
    },
    /// The program that owns the pipeline cannot continue.
    #[error("the run cannot continue: {message}")]
    Abandoned {
        /// Why.
        message: String,
    },
    /// The program that owns the pipeline cannot continue because of a mistake of the user, such as a file
    /// that it can no longer read.
    #[error("the run cannot continue: {message}")]
    WrongInput {
        /// The mistake.
        message: String,
    },
    /// Another rank failed first. Only ranks see this cause; the caller gets the first one.
    #[error("aborted because rank {first} failed")]
    Aborted {
        /// The rank that failed first.
        first: WorldRank,
    },
}

pipewright_schedule::message_as_debug!(Cause);

impl Cause {
    /// Returns why the step failed, without the place of the first value that is not finite.
    pub fn without_origin(&self) -> &Self {
        match self {
            Self::Located { cause, .. } => cause.without_origin(),
            cause => cause,
        }
    }

    /// Returns whether a number is not finite.
    pub(crate) fn is_number(&self) -> bool {
        match self {
            Self::LossNotFinite { .. }
            | Self::AuxiliaryNotFinite { .. }
            | Self::GradientNotFinite { .. }
            | Self::ParameterNotFinite { .. }
            | Self::RemoteNumber { .. } => true,
            Self::Stage(error) => matches!(error, StageError::NotFinite { .. }),
            _ => false,
        }
    }

    /// Returns why a step with this failure is suspicious; `None` if it must not be repeated.
    pub(crate) fn suspicion(&self) -> Option<Suspicion> {
        Some(match self {
            Self::LossNotFinite { microbatch, loss } => {
                Suspicion::Loss { microbatch: *microbatch, loss: *loss }
            }
            Self::AuxiliaryNotFinite { stage, microbatch, name, loss } => Suspicion::Auxiliary {
                name: name.to_string(),
                stage: *stage,
                microbatch: *microbatch,
                loss: *loss,
            },
            Self::GradientNotFinite { parameter } => Suspicion::Gradient { parameter: parameter.to_string() },
            Self::ParameterNotFinite { parameter, .. } => {
                Suspicion::Parameter { parameter: parameter.to_string() }
            }
            Self::Stage(StageError::NotFinite { what }) => Suspicion::Layer { what: what.clone() },
            Self::Stage(StageError::RecomputedResult) => Suspicion::Recomputed,
            _ => return None,
        })
    }

    /// Returns the cause for a panic's payload.
    pub(crate) fn from_panic(payload: &(dyn std::any::Any + Send)) -> Self {
        // A tensor operation that waits for other ranks unwinds with the cause itself.
        if let Some(cause) = payload.downcast_ref::<Self>() {
            return cause.clone();
        }
        let message = panic_message(payload);
        match device_memory(&message) {
            Some(bytes) => Self::DeviceMemory { bytes },
            None => Self::Panic { message },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_memory_is_distinguished_from_other_panics() {
        let cause = |message: &str| Cause::from_panic(&message.to_owned()).to_string();
        let read = "Error while reading data: WithContext { reason: out of device memory allocating 4096 bytes\n0: f }";
        let expected = "the device has no memory left: 4096 bytes were asked for";
        assert_eq!(cause(read), expected);
        assert_eq!(cause("can't allocate buffer of size: 4096\n"), expected);
        assert_eq!(cause("out of cheese"), "the stage panicked: out of cheese");
    }
}
