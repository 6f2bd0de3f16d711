//! Why a pipeline does not start, or does not take a step.

use std::path::PathBuf;

use pipewright_data::DataError;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Action, Level, LowerError, Slices, StageIndex};

use crate::batch::{BatchDisagreement, InputGradientError, SplitError};
use crate::failure::{Divergence, StepError};
use crate::ids::{StepNumber, WorldRank};
use crate::loss_scale::LossScaling;
use crate::stage::{ModulePlace, StageError};
use crate::tensor::BoundaryError;
use crate::transport::AgreementError;

/// Why a pipeline does not start, or does not take a step.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// The training data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The program has several ranks but no communication.
    #[error("the program is at level `{level}`, without communication: lower it to `comms` or `full` first")]
    NotLowered {
        /// The level of the program.
        level: Level,
    },
    /// The world has another size than the program needs.
    #[error(
        "the transport has {}, and {} of a program of {} need {replicas} x {program}{}",
        counted(*.world, "rank"), counted(*.replicas, "replica"), counted(*.program, "rank"),
        if .tensor_ranks == &1 { String::new() } else { format!(" x {tensor_ranks} (tensor ranks)") }
    )]
    WorldSize {
        /// The number of ranks of the transport.
        world: u32,
        /// The number of ranks of the program.
        program: u32,
        /// The number of replicas of the program.
        replicas: u32,
        /// The number of ranks that compute each stage together.
        tensor_ranks: u32,
    },
    /// The replicas do not form groups of this size.
    #[error(
        "{} cannot form groups of {shards}: set `shards` to a divisor of the number of replicas",
        counted(*.replicas, "replica")
    )]
    Shards {
        /// The number of replicas of the program.
        replicas: u32,
        /// The number of replicas of a group.
        shards: u32,
    },
    /// The replicas do not form expert groups of this size, or the groups would add gradients in another
    /// order.
    #[error(
        "{} cannot form groups of {experts} that hold the experts together: set `expert_parallel` to a divisor of the \
         number of replicas that is a power of two, or to that number",
        counted(*.replicas, "replica")
    )]
    ExpertGroups {
        /// The number of replicas of the program.
        replicas: u32,
        /// The number of replicas of a group.
        experts: u32,
    },
    /// Expert groups do not fit the groups of replicas that hold the parameters together.
    #[error(
        "groups of {experts} replicas that hold the experts together do not fit groups of {shards} that hold the other \
         parameters together: set `expert_parallel` to {}",
        .sizes.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ")
    )]
    ExpertShards {
        /// The number of replicas of a shard group.
        shards: u32,
        /// The number of replicas of an expert group.
        experts: u32,
        /// The numbers of replicas of an expert group that fit.
        sizes: Vec<u32>,
    },
    /// Replicas hold the experts together, and another setting does not work with that.
    #[error(
        "{experts} replicas hold the experts together (`expert_parallel`), which does not work with {setting}: leave that \
         out, or set `expert_parallel` to 1"
    )]
    BesideExpertGroups {
        /// The number of replicas of a group.
        experts: u32,
        /// The setting.
        setting: &'static str,
    },
    /// A pipeline on one thread cannot compute a stage on several ranks, because these wait for each other.
    #[error(
        "a seeded pipeline has one thread, and {tensor_ranks} tensor ranks need one each: set tensor_parallel to 1"
    )]
    SeededTensorRanks {
        /// The number of ranks that compute each stage together.
        tensor_ranks: u32,
    },
    /// A training step was begun ([`Pipeline::begin`](super::Pipeline::begin)), and the call needs the state
    /// between two steps.
    #[error("a step has begun and is not finished: call `finish` first")]
    StepBegun,
    /// One training step runs and the next one was begun, so no other can begin.
    #[error("two steps have begun and are not finished: call `finish` before another one begins")]
    StepsBegun,
    /// The step that a trainer has begun was finished by a call of
    /// [`Pipeline::finish`](super::Pipeline::finish).
    #[error(
        "the step that the trainer has begun was finished without it, so its metrics and its position in the data are lost: \
         after `step_ahead`, call `step` or `step_ahead` instead of `finish`"
    )]
    FinishedElsewhere,
    /// The interrupt flag ([`PipelineConfig::interrupt`](super::PipelineConfig::interrupt)) was raised in some
    /// process during an evaluation, which has no result then. It is the same in every process.
    #[error("the evaluation was interrupted: to have its result, lower the flag and evaluate again")]
    Interrupted,
    /// No training step was begun.
    #[error("no step has begun, so none can be finished: call `begin` first")]
    NoStepBegun,
    /// A training step was asked of a pipeline that cannot train.
    #[error("the program is forward-only: call `eval`, or launch the pipeline with a program that trains")]
    ForwardOnly,
    /// The program cuts microbatches into slices, and a setting needs whole ones.
    #[error(
        "the program cuts microbatches into {slices} slices, which does not work with {setting}: leave that out, or use a \
         schedule of whole microbatches, such as `1f1b`"
    )]
    Slices {
        /// The number of slices of each microbatch.
        slices: Slices,
        /// The setting.
        setting: &'static str,
    },
    /// The outputs of a training step whose schedule cuts microbatches into slices were asked for.
    #[error(
        "a training step whose schedule cuts microbatches into slices returns no outputs: do not ask for outputs, or evaluate \
         the batch"
    )]
    SliceOutputs,
    /// The microbatches cannot be cut into slices, or their outputs cannot be joined.
    #[error("the slices of the microbatches: {source}")]
    Cut {
        /// Why not.
        source: SplitError,
    },
    /// The model has no logits with which a text continues.
    #[error(
        "texts cannot be continued, because the model does not return logits of [rows, tokens, vocabulary]: {source}"
    )]
    NoLogits {
        /// Why the first output of a microbatch is not such a tensor.
        source: BoundaryError,
    },
    /// The program of evaluations has its stages on other ranks.
    #[error(
        "the program of evaluations places its stages on other ranks than the program: use a schedule with the same \
         placement, such as the program's own with another number of microbatches"
    )]
    EvaluationPlacement,
    /// The program of evaluations cuts microbatches into another number of slices.
    #[error(
        "the program of evaluations cuts microbatches into {}, and the program into {expected}: use the same number",
        counted(.found.get(), "slice")
    )]
    EvaluationSlices {
        /// The slices of the program of evaluations.
        found: Slices,
        /// The slices of the program.
        expected: Slices,
    },
    /// The forward part of the program cannot be run alone.
    #[error("the forward part of the program cannot be run alone: {0}")]
    NoEvaluation(#[source] LowerError),
    /// Parameters are sharded, but the program does not gather them.
    #[error(
        "parameters are sharded, and a program at level `{level}` never gathers them: lower it to `full`, or keep \
         parameters replicated"
    )]
    NeverGathers {
        /// The level of the program.
        level: Level,
    },
    /// The program trains, but there is no optimizer.
    #[error("a program with backward actions needs `PipelineConfig::optimizer`")]
    NoOptimizer,
    /// The metadata has another number of boundaries than the program.
    #[error(
        "metadata is given for {found} boundaries, the program has {expected}: one before each stage but the first"
    )]
    Metadata {
        /// The number of boundaries in the metadata.
        found: usize,
        /// The number of boundaries of the program.
        expected: usize,
    },
    /// The metadata names a stage without a boundary before it.
    #[error(
        "metadata is given for the inputs of stage {stage}, and the program has {stages} stages: name stages that follow \
         another one"
    )]
    MetadataStage {
        /// The stage.
        stage: StageIndex,
        /// The number of stages of the program.
        stages: u32,
    },
    /// The program moves tensors out of memory, and nothing says to which place.
    #[error(
        "the program has {action}, and no place is given to which it moves tensors: set `offload`, or make the program without it"
    )]
    NoOffloadPlace {
        /// The action.
        action: Action,
    },
    /// Tensors are to leave memory, and no forward is recomputed.
    #[error(
        "`offload` moves the inputs that recomputed forwards keep, and no forward is recomputed: the others keep tapes, which \
         belong to Burn; set `recompute`, or leave `offload` out"
    )]
    OffloadWithoutRecompute,
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
    /// A stage that is to be recomputed does not exist.
    #[error("stage {stage} is to be recomputed, and the program has {}: name stages that exist", counted(*.stages, "stage"))]
    RecomputedStage {
        /// The stage.
        stage: StageIndex,
        /// The number of stages of the program.
        stages: u32,
    },
    /// The settings of the loss scale are outside their bounds.
    #[error(
        "losses are scaled by {settings}: set the initial scale to a power of two, at least 1, and the number of updates to \
         at least 1"
    )]
    LossScaling {
        /// The settings.
        settings: LossScaling,
    },
    /// The batch cannot be split.
    #[error("the {what} cannot be split into microbatches: {source}")]
    Split {
        /// Inputs or targets.
        what: &'static str,
        /// The reason.
        source: SplitError,
    },
    /// The batch has another number of microbatches than the program.
    #[error("{} of {what}, the program has {expected}", counted(*.found, "microbatch"))]
    Microbatches {
        /// Inputs, targets or weights.
        what: &'static str,
        /// The number of microbatches in the batch.
        found: usize,
        /// The number of microbatches of the program.
        expected: u32,
    },
    /// A batch asks for the outputs of a stage that does not exist.
    #[error(
        "the outputs of stage {stage} are to be kept, and the program has {}: name stages that exist",
        counted(*.stages, "stage")
    )]
    NoStage {
        /// The stage.
        stage: StageIndex,
        /// The number of stages of the program.
        stages: u32,
    },
    /// The processes have different batches, or one of them cannot take the step. No process takes it.
    #[error(transparent)]
    Disagreement(#[from] BatchDisagreement),
    /// The step cannot return the gradients of its inputs, or would lose some.
    #[error(transparent)]
    InputGradients(#[from] InputGradientError),
    /// Batches whose gradients are accumulated reduce their losses in different ways.
    #[error(
        "this batch and the batches whose gradients wait for an update reduce their losses in different ways: accumulate batches \
         that all count by rows, by weights, or as sums"
    )]
    MixedReductions,
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
    /// An earlier restore failed after some stages had restored their state.
    #[error(
        "a checkpoint was restored in part: the parameters no longer belong together; launch the pipeline again"
    )]
    HalfRestored,
    /// The pipeline has no module at a place.
    #[error(
        "the pipeline has no module at {place}: name a stage if you made it with `Stage::new`, a layer of `Layers` by its \
         number, or a node of a graph by its name"
    )]
    NoModule {
        /// The place.
        place: ModulePlace,
    },
    /// The module at a place has another type.
    #[error(
        "the module of {place} is a `{found}`, not a `{expected}`: ask for that type, or for a part of it, such as a layer \
         by its number"
    )]
    ModuleType {
        /// The place.
        place: ModulePlace,
        /// The type that was asked for.
        expected: &'static str,
        /// The type of the module.
        found: &'static str,
    },
    /// The module at a place could not be changed.
    #[error("the module of {place} is not changed: {source}")]
    Module {
        /// The place.
        place: ModulePlace,
        /// The reason.
        source: StageError,
    },
    /// A module was to be changed while accumulated gradients wait for an update.
    #[error(
        "gradients of the module as it is wait for an update: take the step that updates before you change it"
    )]
    ChangeBeforeUpdate,
    /// A layer or a loss calls a pipeline of its process while it runs alone: in its first forward, and in
    /// every forward if it draws from the generator of its device.
    #[error(
        "a layer or a loss of this process calls a pipeline, and the pipeline's layers may wait for that layer to end: \
         evaluate the other model before the step, and pass its outputs as targets or side inputs"
    )]
    InsideLayer,
    /// An earlier change of a module failed after some ranks had changed theirs. Freezing parameters is a
    /// change.
    #[error(
        "a module was changed on some ranks only: the parameters no longer belong together; launch the pipeline again"
    )]
    HalfChanged,
}

pipewright_schedule::message_as_debug!(PipelineError);

impl From<Divergence> for PipelineError {
    fn from(Divergence { step, first }: Divergence) -> Self {
        Self::Diverged { step, first: Box::new(first) }
    }
}
