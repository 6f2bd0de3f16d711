//! A running pipeline: ranks with their stages, and the steps they are asked to take.

use std::fmt::Display;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use burn::optim::ModuleOptimizer;
use burn::tensor::TensorData;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use pipewright_schedule::{Level, Rank, StageIndex, ValidatedProgram};

use crate::assembly::{Assembly, StepKind, forward_part};
use crate::batch::Batch;
use crate::boundary::{Boundary, pack};
use crate::checkpoint::{Checkpoint, RankState};
use crate::driver::{Command, RankSeed, RankThread, Reply, ThreadSettings};
use crate::executor::RankReport;
use crate::failure::{Cause, StepError};
use crate::hook::ActionHook;
use crate::memory::RankMemory;
use crate::metadata::{CheckMetadata, Metadata};
use crate::microbatch::{SplitError, split};
use crate::report::{EvalReport, StepReport, evaluation, training};
use crate::stage::Stage;
use crate::transport::{AgreementError, Fields, World};
use crate::value::Values;

/// How a pipeline runs.
#[derive(Clone)]
pub struct PipelineConfig {
    /// Takes the gradients of every stage; none for a pipeline that only evaluates.
    pub optimizer: Option<ModuleOptimizer>,
    /// Gradients are scaled down to this global norm when theirs is greater.
    pub clip_norm: Option<f64>,
    /// Threads for the tensor operations of one rank.
    pub threads_per_rank: usize,
    /// When no rank moves for so long, the step fails.
    pub deadline: Duration,
    /// Replicas of the pipeline, each with its share of every batch. The world has as many ranks as the program, times
    /// this.
    pub data_parallel: u32,
    /// How it is known what crosses the boundaries between stages; the same on all ranks.
    pub metadata: Metadata,
    /// When boundaries are checked against it.
    pub check_metadata: CheckMetadata,
    /// Called around every action.
    pub hook: Option<Arc<dyn ActionHook>>,
    /// Raised by whoever wants training to end: each rank looks at the end of a step, and the step's report says whether
    /// any found it raised. So the processes of a run agree on their last step.
    pub interrupt: Option<Arc<AtomicBool>>,
}

impl Default for PipelineConfig {
    /// No optimizer, no clipping, one thread a rank, a minute, no replicas, metadata found out and checked in the first
    /// step.
    fn default() -> Self {
        Self {
            optimizer: None,
            clip_norm: None,
            threads_per_rank: 1,
            deadline: Duration::from_secs(60),
            data_parallel: 1,
            metadata: Metadata::default(),
            check_metadata: CheckMetadata::default(),
            hook: None,
            interrupt: None,
        }
    }
}

/// A parameter as it stands between two steps.
#[derive(Clone, Debug)]
pub struct NamedParameter {
    /// The stage that holds it.
    pub stage: StageIndex,
    /// Its global path.
    pub path: Arc<str>,
    /// Its values.
    pub data: TensorData,
}

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
    NoEvaluation(String),
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

/// Ranks that run, each with its stages. Dropping it ends them.
pub struct Pipeline {
    assembly: Assembly,
    ranks: Vec<RankThread>,
    replies: Receiver<(Rank, Reply)>,
    step: u64,
    /// How often the ranks were asked to run something; never goes back.
    attempts: u64,
    /// Whether the step under way ends with an update.
    updates: bool,
    /// Whether gradients wait for an update.
    pending: bool,
    /// Why the pipeline takes no further step, when it does not.
    end: Option<End>,
}

/// What ends a pipeline for good.
#[derive(Clone, Copy, Debug)]
enum End {
    /// A rank no longer answers.
    Lost(Rank),
    /// The step left some ranks' parameters updated and others' not.
    Diverged(u64),
    /// A restore failed half-way.
    HalfRestored,
}

impl Pipeline {
    /// Starts a rank for each endpoint of `world`; `make` is called on a rank's own thread for each of its stages.
    ///
    /// # Errors
    /// When program, world and configuration do not fit together, or a stage cannot be made.
    pub fn launch<F, E>(
        program: ValidatedProgram,
        world: World,
        config: &PipelineConfig,
        make: F,
    ) -> Result<Self, PipelineError>
    where
        F: Fn(StageIndex) -> Result<Stage, E> + Send + Sync + 'static,
        E: Display,
    {
        let mut world = world;
        world.set_deadline(config.deadline);
        world.agree(Ok(identity(&program, config)), config.deadline)?;
        let (assembly, endpoints) = Assembly::new(program, world, config)?;
        let make = Arc::new(make);
        let (sender, replies) = crossbeam_channel::unbounded();
        let mut ranks = Vec::new();
        for endpoint in endpoints {
            let rank = endpoint.rank();
            let (building, make) = (assembly.clone(), make.clone());
            let seed = RankSeed {
                settings: ThreadSettings {
                    threads: config.threads_per_rank.max(1),
                    deadline: config.deadline,
                },
                board: assembly.board.clone(),
                abort: assembly.abort.clone(),
                memory: RankMemory::new(),
                build: move |memory| building.build(endpoint, memory, &*make),
                replies: sender.clone(),
                rank,
            };
            ranks.push(RankThread::start(seed).map_err(|source| PipelineError::Thread { rank, source })?);
        }
        let mut pipeline = Self {
            assembly,
            ranks,
            replies,
            step: 0,
            attempts: 0,
            updates: false,
            pending: false,
            end: None,
        };
        pipeline.await_ranks(|reply| match reply {
            Reply::Ready(ready) => ready,
            _ => unreachable!("the first reply of a rank says that it is ready"),
        })?;
        Ok(pipeline)
    }

    /// The program that the pipeline runs.
    pub fn program(&self) -> &ValidatedProgram {
        &self.assembly.program
    }

    /// Splits a batch into the program's microbatches along dimension 0, trains on it, and takes one optimizer step.
    ///
    /// # Errors
    /// When the batch does not divide, or a rank fails. A failed step changes no parameter and leaves the pipeline
    /// ready for the next one; where that cannot be had, the next one says so ([`PipelineError::Diverged`],
    /// [`Cause::LostPeer`]).
    pub fn step(
        &mut self,
        inputs: impl Boundary,
        targets: impl Boundary,
        learning_rate: f64,
    ) -> Result<StepReport, PipelineError> {
        let inputs = self.split("inputs", inputs)?;
        let targets = self.split("targets", targets)?;
        self.step_batch(Batch::new(inputs, targets), learning_rate)
    }

    /// As [`Pipeline::step`], with a batch that is split already and may bring side inputs.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn step_batch(&mut self, batch: Batch, learning_rate: f64) -> Result<StepReport, PipelineError> {
        self.train(batch, StepKind::Train { learning_rate, update: true })
    }

    /// As [`Pipeline::step_batch`], without an update: the gradients stay, and the next steps' are added to them. The
    /// step that updates takes the mean over all microbatches since the last update. A step that fails drops them.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn accumulate(&mut self, batch: Batch) -> Result<StepReport, PipelineError> {
        self.train(batch, StepKind::Train { learning_rate: 0.0, update: false })
    }

    fn train(&mut self, batch: Batch, kind: StepKind) -> Result<StepReport, PipelineError> {
        if self.assembly.program.is_forward_only() {
            return Err(PipelineError::ForwardOnly);
        }
        let start = Instant::now();
        let shares = batch.shares();
        let reports = self.run(batch, kind, start)?;
        self.pending = !self.updates;
        Ok(training(self.step, shares, reports, start.elapsed()))
    }

    /// Runs the forward part of the program on a batch, without a tape; with targets it returns losses too. Parameters
    /// and accumulated gradients stay as they are; an evaluation that fails drops the gradients.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval(
        &mut self,
        inputs: impl Boundary,
        targets: Option<impl Boundary>,
    ) -> Result<EvalReport, PipelineError> {
        let inputs = self.split("inputs", inputs)?;
        let targets = targets.map(|targets| self.split("targets", targets)).transpose()?.unwrap_or_default();
        self.eval_batch(Batch::new(inputs, targets))
    }

    /// As [`Pipeline::eval`], with a batch that is split already and may bring side inputs.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval_batch(&mut self, batch: Batch) -> Result<EvalReport, PipelineError> {
        if self.assembly.evaluation.is_none() {
            let program = forward_part(&self.assembly.program).map_err(PipelineError::NoEvaluation)?;
            self.assembly.evaluation = Some(Arc::new(program));
        }
        let shares = batch.shares();
        let reports = self.run(batch, StepKind::Evaluate, Instant::now())?;
        Ok(evaluation(shares, reports))
    }

    /// The parameters of all stages of this process, as they stand.
    ///
    /// # Errors
    /// When a rank no longer answers.
    pub fn parameters(&mut self) -> Result<Vec<NamedParameter>, PipelineError> {
        self.command(|| Command::Parameters)?;
        let of_ranks = self.await_ranks(|reply| match reply {
            Reply::Parameters(parameters) => Ok(parameters),
            _ => unreachable!("a rank answers what it was asked"),
        })?;
        Ok(of_ranks.into_iter().flatten().collect())
    }

    /// The state of all ranks of this process that belong to the first replica, sharing storage with the running model:
    /// nothing is copied here. What the next update writes to is copied then, unless the state was dropped by that
    /// time.
    ///
    /// # Errors
    /// When gradients wait for an update, or a rank no longer answers.
    pub fn state(&mut self) -> Result<Vec<RankState>, PipelineError> {
        if self.pending {
            return Err(PipelineError::GradientsPending);
        }
        self.command(|| Command::State)?;
        let mut ranks = self.await_ranks(|reply| match reply {
            Reply::State(state) => Ok(*state),
            _ => unreachable!("a rank answers what it was asked"),
        })?;
        ranks.retain(|rank| !rank.stages.is_empty());
        Ok(ranks)
    }

    /// Takes over parameters and optimizer state from a checkpoint, whatever cut and schedule wrote it. The next step is
    /// the one after the checkpoint's.
    ///
    /// # Errors
    /// When the checkpoint lacks a parameter or has one of another shape, when the optimizer does not take its state, or
    /// when a rank no longer answers. The pipeline then takes no further step.
    pub fn restore(&mut self, checkpoint: &Arc<Checkpoint>) -> Result<(), PipelineError> {
        self.command(|| Command::Restore(checkpoint.clone()))?;
        let restored = self.await_ranks(|reply| match reply {
            Reply::Restored(restored) => restored,
            _ => unreachable!("a rank answers what it was asked"),
        });
        if let Err(error) = restored {
            if !matches!(self.end, Some(End::Lost(_))) {
                self.end = Some(End::HalfRestored);
            }
            return Err(error.into());
        }
        (self.step, self.pending) = (checkpoint.step(), false);
        Ok(())
    }

    fn split(&self, what: &'static str, batch: impl Boundary) -> Result<Vec<Values>, PipelineError> {
        split(&pack(batch), self.assembly.microbatches())
            .map_err(|source| PipelineError::Split { what, source })
    }

    fn run(
        &mut self,
        batch: Batch,
        kind: StepKind,
        origin: Instant,
    ) -> Result<Vec<RankReport>, PipelineError> {
        let ranks = self.ranks.iter().map(|thread| thread.rank);
        let numbers = (self.step + 1, self.attempts + 1);
        let inputs = self.assembly.step_inputs(ranks, numbers, batch, kind, origin)?;
        (self.step, self.attempts) = numbers;
        self.updates = matches!(kind, StepKind::Train { update: true, .. });
        let mut inputs = inputs.into_iter();
        self.command(|| Command::Step(Box::new(inputs.next().expect("an input a rank"))))?;
        let mut any_updated = false;
        let reports = self.await_ranks(|reply| match reply {
            Reply::Step { outcome, has_updated } => {
                any_updated |= has_updated;
                outcome
            }
            _ => unreachable!("a rank answers what it was asked"),
        });
        let reports = reports.map_err(|error| self.failed_step(error, any_updated))?;
        Ok(reports.into_iter().flatten().collect())
    }

    /// Leaves the ranks fit for the next step, where that can be had.
    fn failed_step(&mut self, error: StepError, any_updated: bool) -> StepError {
        // A step that fails drops all gradients.
        self.pending = false;
        if any_updated || error.in_update() {
            self.end.get_or_insert(End::Diverged(self.step));
        } else {
            // Ranks that finished may hold gradients of this step, the others lost those of the steps before it.
            for thread in &self.ranks {
                let _ = thread.commands.send(Command::Reset);
            }
        }
        error
    }

    /// A call that tells the ranks of other processes that this one is at work between two steps, so that they wait
    /// longer than the deadline for it.
    pub fn keep_alive(&self) -> impl Fn() + Send + use<> {
        let (board, rank) = (self.assembly.board.clone(), self.ranks.first().map(|thread| thread.rank));
        move || {
            if let Some(rank) = rank {
                board.keep_alive(rank);
            }
        }
    }

    /// Tells the ranks of other processes that this one cannot go on, so that they do not wait for it.
    pub fn abandon(&self, reason: &str) {
        let rank = self.ranks.first().map_or(Rank::new(0), |thread| thread.rank);
        let cause = Cause::Abandoned { message: reason.to_owned() };
        self.assembly.abort.raise(StepError { rank, step: self.step, action: None, cause });
    }

    fn command(&mut self, mut command: impl FnMut() -> Command) -> Result<(), PipelineError> {
        match self.end {
            Some(End::Lost(peer)) => return Err(self.lost_peer(peer).into()),
            Some(End::Diverged(step)) => return Err(PipelineError::Diverged { step }),
            Some(End::HalfRestored) => return Err(PipelineError::HalfRestored),
            None => {}
        }
        for thread in &self.ranks {
            if thread.commands.send(command()).is_err() {
                return Err(self.lost_peer(thread.rank).into());
            }
        }
        Ok(())
    }

    fn lost_peer(&self, peer: Rank) -> StepError {
        StepError { rank: peer, step: self.step, action: None, cause: Cause::LostPeer { peer } }
    }

    /// One reply of every rank, in rank order; or, when any failed, the first cause. All ranks have answered then, and
    /// the abort flag is lowered.
    fn await_ranks<T>(
        &mut self,
        mut take: impl FnMut(Reply) -> Result<T, StepError>,
    ) -> Result<Vec<T>, StepError> {
        let mut answers: Vec<Option<Result<T, StepError>>> = self.ranks.iter().map(|_| None).collect();
        let mut moves = self.assembly.board.moves();
        while let Some(silent) = answers.iter().position(Option::is_none) {
            match self.replies.recv_timeout(self.assembly.config.deadline) {
                Ok((rank, reply)) => {
                    let place = self.ranks.iter().position(|thread| thread.rank == rank);
                    answers[place.expect("only ranks of this process answer")] = Some(take(reply));
                }
                Err(RecvTimeoutError::Timeout) if self.assembly.board.moves() != moves => {
                    moves = self.assembly.board.moves();
                }
                Err(_) => return Err(self.give_up(self.ranks[silent].rank)),
            }
        }
        let first = self.assembly.abort.first();
        self.assembly.abort.clear();
        let answers: Result<Vec<T>, StepError> = answers.into_iter().flatten().collect();
        // Another process may have failed when all ranks of this one had answered.
        let answers = match &first {
            Some(first) => answers.and(Err(first.clone())),
            None => answers,
        };
        answers.map_err(|error| {
            let first = first.unwrap_or(error);
            if let Cause::LostPeer { peer } | Cause::SilentPeer { peer, .. } = first.cause {
                self.end = Some(End::Lost(peer));
            }
            first
        })
    }

    /// A rank has neither moved nor answered for the deadline: its stage does not come back. The others are told to
    /// stop; the thread cannot be, and is left behind.
    fn give_up(&mut self, silent: Rank) -> StepError {
        self.end = Some(End::Lost(silent));
        let report = self.assembly.board.report();
        let cause = Cause::Deadline { waited: self.assembly.config.deadline, report };
        self.assembly.abort.raise(StepError { rank: silent, step: self.step, action: None, cause });
        self.assembly.abort.first().unwrap_or_else(|| self.lost_peer(silent))
    }
}

/// What must be the same on every process for its ranks to fit together.
fn identity(program: &ValidatedProgram, config: &PipelineConfig) -> Fields {
    let placement = program.placement();
    let mut rows = DefaultHasher::new();
    placement.all_ranks().for_each(|rank| program.row(rank).hash(&mut rows));
    let stages = placement.all_ranks().map(|rank| {
        let stages = placement.stages_of(rank).iter().map(ToString::to_string);
        stages.collect::<Vec<_>>().join("+")
    });
    let fields = [
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("program", format!("{:016x}", rows.finish())),
        ("placement", stages.collect::<Vec<_>>().join(" ")),
        ("microbatches", program.microbatches().to_string()),
        ("metadata", config.metadata.fingerprint()),
        ("clip norm", format!("{:?}", config.clip_norm)),
        ("replicas", config.data_parallel.to_string()),
        ("trains", config.optimizer.is_some().to_string()),
    ];
    fields.map(|(name, value)| (name.to_owned(), value)).into()
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        for RankThread { commands, handle, .. } in self.ranks.drain(..) {
            drop(commands);
            // A lost rank's thread may never end; the others end at their closed channel.
            if !matches!(self.end, Some(End::Lost(_))) {
                let _ = handle.join();
            }
        }
    }
}
