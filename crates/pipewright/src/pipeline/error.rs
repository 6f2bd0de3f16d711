//! Why a pipeline does not start, or does not take a step.

use std::error::Error;
use std::path::PathBuf;

use pipewright_data::DataError;
use pipewright_schedule::{Action, Level};

use crate::batch::{BatchDisagreement, SplitError};
use crate::failure::{Divergence, StepError};
use crate::ids::{StepNumber, WorldRank};
use crate::transport::AgreementError;

/// Why a pipeline does not start, or does not take a step.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// The training data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Program, world and configuration do not fit together.
    #[error(transparent)]
    Setup(Mistake),
    /// The program moves tensors out of memory, and nothing says to which place.
    #[error(
        "the program has {action}, and no place is given to which it moves tensors: set `offload`, or make the program without it"
    )]
    NoOffloadPlace {
        /// The action.
        action: Action,
    },
    /// The program moves tensors that cannot leave memory.
    #[error(
        "{action} moves the inputs that a recomputed forward keeps, and its forward is not recomputed: it keeps a tape, which \
         belongs to Burn; set `recompute`, or make the program without {action}"
    )]
    OffloadedTape {
        /// The action.
        action: Action,
    },
    /// Tensors cannot be written to a folder.
    #[error("the inputs of forwards cannot be written to `{}`: {source}; choose another folder", .folder.display())]
    OffloadFolder {
        /// The folder.
        folder: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The system cannot start a thread.
    #[error("rank {rank} cannot be started: {source}")]
    Thread {
        /// The rank.
        rank: WorldRank,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The processes have different programs or settings.
    #[error(transparent)]
    Agreement(#[from] AgreementError),
    /// The batch cannot be used, or what it asks for cannot be returned.
    #[error(transparent)]
    Batch(Mistake),
    /// The processes have different batches, or one of them cannot take the step. No process takes it.
    #[error(transparent)]
    Disagreement(#[from] BatchDisagreement),
    /// A training step was begun ([`Pipeline::begin`](super::Pipeline::begin)), and the call needs the state
    /// between two steps.
    #[error("a step has begun and is not finished: call `finish` first")]
    StepBegun,
    /// As many training steps have begun as can be ([`Pipeline::begin`](super::Pipeline::begin)).
    #[error("the next steps have begun and are not finished: call `finish` before another one begins")]
    StepsBegun,
    /// The step that a trainer has begun was finished by a call of
    /// [`Pipeline::finish`](super::Pipeline::finish).
    #[error(
        "the step that the trainer has begun was finished without it, so its metrics and its position in the data are lost: \
         after `step_ahead`, call `step` or `step_ahead` instead of `finish`"
    )]
    FinishedElsewhere,
    /// No training step was begun.
    #[error("no step has begun, so none can be finished: call `begin` first")]
    NoStepBegun,
    /// The interrupt flag ([`PipelineConfig::interrupt`](super::PipelineConfig::interrupt)) was raised in some
    /// process during an evaluation, which has no result then. It is the same in every process.
    #[error("the evaluation was interrupted: to have its result, lower the flag and evaluate again")]
    Interrupted,
    /// A step or the construction of a stage failed. For a step,
    /// [`Pipeline::step_failure`](super::Pipeline::step_failure) shows the schedule around the failure.
    #[error(transparent)]
    Step(#[from] StepError),
    /// An earlier step failed after some ranks had updated their parameters.
    #[error(
        "step {step} failed after some ranks had updated their parameters and others had not: they no longer belong \
         together; start again from a checkpoint; the first failure is: {first}"
    )]
    Diverged {
        /// The step that failed.
        step: StepNumber,
        /// The failure of that step which was first reported.
        #[source]
        first: Box<StepError>,
    },
    /// The state was asked for while accumulated gradients wait for an update.
    #[error(
        "gradients wait for an update, and a checkpoint does not hold them: take the step that updates first"
    )]
    GradientsPending,
    /// A module was to be changed while accumulated gradients wait for an update.
    #[error(
        "gradients of the module as it is wait for an update: take the step that updates before you change it"
    )]
    ChangeBeforeUpdate,
    /// An earlier restore failed after some stages had restored their state.
    #[error(
        "a checkpoint was restored in part: the parameters no longer belong together; launch the pipeline again"
    )]
    HalfRestored,
    /// An earlier change of a module failed after some ranks had changed theirs. Freezing parameters is a
    /// change.
    #[error(
        "a module was changed on some ranks only: the parameters no longer belong together; launch the pipeline again"
    )]
    HalfChanged,
    /// The pipeline has no module of the type at the place, or the module could not be changed.
    #[error(transparent)]
    Module(Mistake),
    /// A layer or a loss calls a pipeline of its process while it runs alone: in its first forward, and in
    /// every forward if it draws from the generator of its device.
    #[error(
        "a layer or a loss of this process calls a pipeline, and the pipeline's layers may wait for that layer to end: \
         evaluate the other model before the step, and pass its outputs as targets or side inputs"
    )]
    InsideLayer,
}

pipewright_schedule::message_as_debug!(PipelineError);

/// A mistake in a sentence, and the error that caused it, if another part has found it.
#[derive(thiserror::Error)]
#[error("{sentence}")]
pub struct Mistake {
    sentence: String,
    #[source]
    cause: Option<Box<dyn Error + Send + Sync>>,
}

pipewright_schedule::message_as_debug!(Mistake);

impl Mistake {
    pub(crate) fn caused(sentence: String, cause: impl Error + Send + Sync + 'static) -> Self {
        Self { sentence, cause: Some(Box::new(cause)) }
    }
}

impl PipelineError {
    pub(super) fn setup(sentence: impl Into<String>) -> Self {
        Self::Setup(Mistake { sentence: sentence.into(), cause: None })
    }

    pub(super) fn batch(sentence: impl Into<String>) -> Self {
        Self::Batch(Mistake { sentence: sentence.into(), cause: None })
    }

    pub(super) fn module(sentence: impl Into<String>) -> Self {
        Self::Module(Mistake { sentence: sentence.into(), cause: None })
    }

    /// Returns the error of a program with several ranks but without communication.
    pub(super) fn not_lowered(level: Level) -> Self {
        Self::setup(format!(
            "the program is at level `{level}`, without communication: lower it to `comms` or `full` first"
        ))
    }

    /// Returns the error of sharded parameters that the program does not gather.
    pub(super) fn never_gathers(level: Level) -> Self {
        Self::setup(format!(
            "parameters are sharded, and a program at level `{level}` never gathers them: lower it to `full`, or keep \
             parameters replicated"
        ))
    }

    /// Returns the error of expert groups together with a setting that does not work with them.
    pub(super) fn beside_expert_groups(experts: u32, setting: &str) -> Self {
        Self::setup(format!(
            "{experts} replicas hold the experts together (`expert_parallel`), which does not work with {setting}: leave that \
             out, or set `expert_parallel` to 1"
        ))
    }

    /// Returns the error of slices that cannot be made or joined.
    pub(super) fn slices(reason: SplitError) -> Self {
        Self::Batch(Mistake::caused(format!("the slices of the microbatches: {reason}"), reason))
    }
}

impl From<Divergence> for PipelineError {
    fn from(Divergence { step, first }: Divergence) -> Self {
        Self::Diverged { step, first: Box::new(first) }
    }
}
