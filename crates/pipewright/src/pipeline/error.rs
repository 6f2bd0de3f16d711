//! Why a pipeline does not start, or does not take a step.

use pipewright_schedule::{Level, LowerError, Rank, StageIndex};

use crate::batch::SplitError;
use crate::failure::StepError;
use crate::transport::AgreementError;

/// Why a pipeline does not start, or does not take a step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// The program has no communication in it, and more than one rank.
    #[error("the program is at level `{level}`, without communication: lower it to `comms` or `full` first")]
    NotLowered {
        /// Its level.
        level: Level,
    },
    /// A world of another size than the program.
    #[error(
        "the transport has {world} ranks; {replicas} replica(s) of a program of {program} need as many as that makes"
    )]
    WorldSize {
        /// Ranks of the transport.
        world: u32,
        /// Ranks of the program.
        program: u32,
        /// Replicas of it.
        replicas: u32,
    },
    /// A training step on a pipeline that cannot train.
    #[error("the program is forward-only: call `eval`, or launch the pipeline with a program that trains")]
    ForwardOnly,
    /// The forward part of the program is not a program.
    #[error("the forward part of the program cannot be run alone: {0}")]
    NoEvaluation(#[source] LowerError),
    /// Sharded parameters and a program that leaves them where they are.
    #[error(
        "parameters are sharded, and a program at level `{level}` never gathers them: lower it to `full`, or keep \
         parameters replicated"
    )]
    NeverGathers {
        /// Its level.
        level: Level,
    },
    /// Training without an optimizer.
    #[error("a program with backward actions needs `PipelineConfig::optimizer`")]
    NoOptimizer,
    /// Metadata for another number of boundaries than the program has.
    #[error(
        "metadata is given for {found} boundaries, the program has {expected}: one before each stage but the first"
    )]
    Metadata {
        /// Boundaries described.
        found: usize,
        /// Boundaries of the program.
        expected: usize,
    },
    /// The last stage has no loss.
    #[error("stage {stage} is the last one and has no loss: make it with `Stage::with_loss`")]
    NoLoss {
        /// The last stage.
        stage: StageIndex,
    },
    /// The batch cannot be split.
    #[error("the {what} cannot be split into microbatches: {source}")]
    Split {
        /// Inputs or targets.
        what: &'static str,
        /// Why.
        source: SplitError,
    },
    /// Another number of microbatches than the program has.
    #[error("{found} microbatches of {what}, the program has {expected}")]
    Microbatches {
        /// Inputs or targets.
        what: &'static str,
        /// Microbatches given.
        found: usize,
        /// Microbatches of the program.
        expected: u32,
    },
    /// The system gives no thread.
    #[error("rank {rank} cannot be started: {source}")]
    Thread {
        /// The rank.
        rank: Rank,
        /// What the system said.
        source: std::io::Error,
    },
    /// The processes are not about to run the same.
    #[error(transparent)]
    Agreement(#[from] AgreementError),
    /// A step, or the making of a stage, failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// An earlier step failed after some ranks had taken it.
    #[error(
        "step {step} failed after some ranks had updated their parameters and others had not: they no longer belong \
         together; start again from a checkpoint"
    )]
    Diverged {
        /// The step that failed.
        step: u64,
    },
    /// A state was asked for in the middle of an accumulation.
    #[error(
        "gradients wait for an update, and a checkpoint does not hold them: take the step that updates first"
    )]
    GradientsPending,
    /// An earlier restore failed after some stages had taken their state.
    #[error(
        "a checkpoint was taken over in part: the parameters no longer belong together; launch the pipeline again"
    )]
    HalfRestored,
}
