//! [`Cause`]: why a rank failed.

use std::sync::Arc;
use std::time::Duration;

use pipewright_schedule::error_text::panic_message;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Action, Microbatch, StageIndex};

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
    /// A hook around an action did not run it.
    #[error("the hook did not run {action}: a hook around an action must call `run`")]
    LeftOut {
        /// The action.
        action: Action,
    },
    /// A function of a hook did not gather the parameters of a stage that computes.
    #[error(
        "the parameters of stage {stage} are not gathered: the function that runs its UNSHARD must call `run` or \
         `set_parameters`"
    )]
    NotGathered {
        /// The stage.
        stage: StageIndex,
    },
    /// A function that runs an action left out blocks.
    #[error(
        "the function that runs {action} left out block {block} and those behind it: run all blocks, or call `run_all`"
    )]
    BlocksLeft {
        /// The action.
        action: Action,
        /// The block that was to run next. A backward begins with the last block.
        block: usize,
    },
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
    /// Two parameters have one path, and a stage that holds it does not declare it as shared.
    #[error(
        "stages {} and {} each have a parameter `{parameter}`, and stage {undeclared} does not declare it as shared: give \
         different parameters different paths (`StageModule::parameter_path`, or `Stage::with_prefix`); if it is one \
         parameter, name its path in `StageModule::shared_parameters` of both", .stages.0, .stages.1
    )]
    EqualPaths {
        /// The path.
        parameter: Arc<str>,
        /// The stages; twice the same one if it has both.
        stages: (StageIndex, StageIndex),
        /// The first stage that does not declare the path.
        undeclared: StageIndex,
    },
    /// Layers have shards of one parameter, and cut it in different ways.
    #[error(
        "stages {} and {} cut the parameter `{parameter}` into {} and {}: name the same number in \
         `StageModule::placement` of all layers that have a shard of it",
        .stages.0, .stages.1, .shards.0, counted(.shards.1, "shard")
    )]
    LayerShards {
        /// The path.
        parameter: Arc<str>,
        /// The stages.
        stages: (StageIndex, StageIndex),
        /// The number of shards on each of them; 1 if it holds the whole parameter.
        shards: (u32, u32),
    },
    /// Two stages share a parameter but hold it with different shapes.
    #[error(
        "stages {} and {} share the parameter `{parameter}`, but hold it with shapes {:?} and {:?}: give different \
         parameters different paths (`StageModule::parameter_path`)",
        .stages.0, .stages.1, .shapes.0, .shapes.1
    )]
    SharedShape {
        /// The path.
        parameter: Arc<str>,
        /// The first owner and one that differs from it.
        stages: (StageIndex, StageIndex),
        /// Their shapes.
        shapes: (Vec<usize>, Vec<usize>),
    },
    /// A rank of a tensor group holds another part of a parameter than the placement says.
    #[error(
        "tensor rank {rank} of stage {stage} holds `{parameter}` with the shape {:?}, and its shard has the shape {:?}: cut the \
         parameter with `TensorParallel::shard`, and name the cut in `StageModule::placement`",
        .shapes.1, .shapes.0
    )]
    ShardShape {
        /// The stage.
        stage: StageIndex,
        /// The parameter's path.
        parameter: Arc<str>,
        /// The rank's place in its tensor group.
        rank: u32,
        /// The shape of the shard that the placement gives the rank, and the shape of the rank's parameter.
        shapes: (Vec<usize>, Vec<usize>),
    },
    /// More or fewer ranks of a tensor group hold a parameter than the placement says.
    #[error(
        "`{parameter}` is on {} of stage {stage}, and should be on {}: give each rank its part, or name \
         `Placement::ON_ONE_RANK` in `StageModule::placement` on the one rank that holds it",
        counted(.ranks.0, "tensor rank"), .ranks.1
    )]
    ShardHolders {
        /// The stage.
        stage: StageIndex,
        /// The parameter's path.
        parameter: Arc<str>,
        /// The number of ranks that hold it, and the number of ranks that should.
        ranks: (usize, usize),
    },
    /// More or fewer replicas of an expert group hold a parameter than the placement says.
    #[error(
        "`{parameter}` of stage {stage} is on {} that hold the experts together, and should be on {}: build only the experts \
         of `TensorParallel::experts` on each replica and name `Placement::ON_ONE_REPLICA` for them in \
         `StageModule::placement`, and build every other parameter on each replica",
        counted(.replicas.0, "replica"), .replicas.1
    )]
    ExpertHolders {
        /// The stage.
        stage: StageIndex,
        /// The parameter's path.
        parameter: Arc<str>,
        /// The number of replicas of a group that hold it, and the number of replicas that should.
        replicas: (usize, usize),
    },
    /// Ranks of a tensor group should hold the same part of a parameter, and have different values.
    #[error(
        "tensor rank {rank} of stage {stage} has other values of `{parameter}` than the first rank with the same part: start \
         copies with the same values; if each rank holds a shard of its own, name the cut in `StageModule::placement`"
    )]
    ShardValues {
        /// The stage.
        stage: StageIndex,
        /// The parameter's path.
        parameter: Arc<str>,
        /// The rank's place in its tensor group.
        rank: u32,
    },
    /// Two copies of a shared parameter have different initial values.
    #[error(
        "stages {} and {} share the parameter `{parameter}`, but their copies differ: copies must start with the same \
         values", .stages.0, .stages.1
    )]
    SharedValues {
        /// The path.
        parameter: Arc<str>,
        /// The first owner and one that differs from it.
        stages: (StageIndex, StageIndex),
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
