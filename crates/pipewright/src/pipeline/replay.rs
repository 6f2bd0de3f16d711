//! [`StepReplay`]: computes ranks of one step again, with one rank in memory at a time.
//!
//! A replayed rank is made, restored and polled as in a run. Its messages come from a list, and what it sends is added to
//! the list. If it waits for a message that is not in the list, it is dropped, the sender is replayed until it has sent the
//! message, and then the rank begins again:
//!
//! ```text
//! compute(r): replay r --done--> its report
//!               ^  |
//!               |  +--waits for a message of q--> drop r; replay q until it has sent it --+
//!               +---------------------------------------------------------------------------+
//! ```
//!
//! A rank computes the same bits each time, so it sends the same messages. The list holds the tensors of all boundaries
//! that were sent so far; parameters and activations are in memory for one rank only. With GPipe, a rank waits for the forwards
//! of the ranks before it, for the backwards of the ranks after it, and for the norm, so it begins a few times. With
//! other schedules it waits more often. With several batches per update, it waits in each of them, and computes the batches
//! before it again, so the time grows with the square of their number.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::sync::Arc;

use pipewright_schedule::{StageIndex, ValidatedProgram};

use super::error::PipelineError;
use super::setup::Setup;
use super::step_plan::{CheckedBatch, StepAttempt, StepPlan};
use crate::batch::{Batch, Purpose};
use crate::checkpoint::{Checkpoint, Fingerprint, PartialLeaf, StageLeaves};
use crate::config::PipelineConfig;
use crate::driver::caught;
use crate::executor::{Executor, Poll, RankReport, StepOrigin};
use crate::failure::StepError;
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::memory::RankMemory;
use crate::mesh::RankGroups;
use crate::message::{AwaitedMessage, Message, Tag};
use crate::nn::TensorParallel;
use crate::stage::Stage;
use crate::transport::{InFlight, World};

/// The receiver, the attempt, the sender and the purpose of a message.
type Key = (WorldRank, Attempt, WorldRank, Tag);

/// A step that is computed again, one rank at a time.
pub struct StepReplay<F> {
    program: ValidatedProgram,
    config: PipelineConfig,
    make: F,
    checkpoint: Option<Arc<Checkpoint>>,
    batches: Vec<Batch>,
    learning_rate: f64,
    messages: HashMap<Key, Message>,
    /// The hashes before the step, of the ranks that were replayed.
    before: BTreeMap<WorldRank, StageLeaves>,
}

/// The batches of a step and its learning rate.
#[derive(Debug)]
pub struct ReplayedBatches {
    /// The batches whose gradients are summed, in order.
    pub batches: Vec<Batch>,
    /// The learning rate of the update.
    pub learning_rate: f64,
}

/// A stage after a step that was computed again.
#[derive(Clone, Debug)]
pub struct ReplayedStage {
    /// The trained parameters of the stage, each with its optimizer state.
    pub fingerprint: Fingerprint,
    /// The norm of the gradients of all stages before clipping.
    pub gradient_norm: f64,
}

/// How far a replayed rank came.
enum Visit {
    /// It has its state before the step.
    Ready,
    Done(Box<RankReport>),
    Waits(Attempt, AwaitedMessage),
}

impl<F, E> StepReplay<F>
where
    F: Fn(StageIndex, &TensorParallel) -> Result<Stage, E>,
    E: Display,
{
    /// Replays the step after a checkpoint, or the first one if there is none. `make` makes a stage as for
    /// [`Pipeline::launch_split`](super::Pipeline::launch_split), each time that a rank begins.
    ///
    /// # Errors
    /// When ranks compute stages together, or hold experts together: they exchange messages inside of an action.
    pub fn new(
        program: ValidatedProgram,
        config: PipelineConfig,
        checkpoint: Option<Arc<Checkpoint>>,
        step: ReplayedBatches,
        make: F,
    ) -> Result<Self, PipelineError> {
        if config.tensor_parallel > 1 || config.expert_parallel > 1 {
            return Err(PipelineError::setup(
                "a step is computed again by one rank at a time, and its ranks compute stages together: set \
                 `tensor_parallel` and `expert_parallel` to 1",
            ));
        }
        let config = PipelineConfig { fingerprint_every: 1, ..config };
        let ReplayedBatches { batches, learning_rate } = step;
        let (messages, before) = (HashMap::new(), BTreeMap::new());
        Ok(Self { program, config, make, checkpoint, batches, learning_rate, messages, before })
    }

    /// Returns the state of a stage before the step.
    ///
    /// # Errors
    /// When a stage cannot be made or restored.
    pub fn state_before(&mut self, stage: StageIndex) -> Result<Fingerprint, PipelineError> {
        for rank in self.holders_of(stage) {
            while let Visit::Waits(attempt, awaited) = self.visit(rank, false)? {
                self.obtain(rank, attempt, awaited)?;
            }
        }
        Ok(self.known_before(stage))
    }

    /// Returns the states of the stages before the step, of all ranks that were replayed so far. A stage that no rank has
    /// is left out.
    pub fn states_before(&self) -> BTreeMap<StageIndex, Fingerprint> {
        let stages = (0..self.program.placement().stages()).map(StageIndex::new);
        let known = stages.map(|stage| (stage, self.known_before(stage)));
        known.filter(|(_, state)| state.parameters().next().is_some()).collect()
    }

    /// Computes the step on the ranks of a stage.
    ///
    /// # Errors
    /// When a rank fails, or a batch cannot be used.
    pub fn stage(&mut self, stage: StageIndex) -> Result<ReplayedStage, PipelineError> {
        let (mut leaves, mut gradient_norm) = (Vec::new(), 0.0);
        for rank in self.holders_of(stage) {
            let mut report = self.compute(rank)?;
            gradient_norm = report.results.gradient_norm.unwrap_or_default();
            leaves.extend(report.fingerprint.take().unwrap_or_default());
        }
        Ok(ReplayedStage { fingerprint: of_stage(stage, leaves), gradient_norm })
    }

    /// Returns the ranks that hold a stage together, of the first replicas.
    fn holders_of(&self, stage: StageIndex) -> Vec<WorldRank> {
        let mesh = self.config.mesh(self.program.ranks());
        let rank = self.program.placement().rank_of(stage);
        let all = (0..mesh.pipeline * mesh.data).map(WorldRank::new);
        all.filter(|world| {
            let coord = mesh.coord(*world);
            coord.rank == rank && coord.replica < mesh.shards
        })
        .collect()
    }

    fn known_before(&self, stage: StageIndex) -> Fingerprint {
        let holders = self.holders_of(stage);
        let known = holders.iter().filter_map(|rank| self.before.get(rank));
        of_stage(stage, known.flatten().cloned())
    }

    /// Replays a rank until it has done its part of the step.
    fn compute(&mut self, rank: WorldRank) -> Result<RankReport, PipelineError> {
        loop {
            match self.visit(rank, true)? {
                Visit::Done(report) => return Ok(*report),
                Visit::Waits(attempt, awaited) => self.obtain(rank, attempt, awaited)?,
                Visit::Ready => {}
            }
        }
    }

    /// Replays the sender of a message until it has sent it.
    fn obtain(
        &mut self,
        to: WorldRank,
        attempt: Attempt,
        awaited: AwaitedMessage,
    ) -> Result<(), PipelineError> {
        let AwaitedMessage { from, tag } = awaited;
        while !self.messages.contains_key(&(to, attempt, from, tag)) {
            match self.visit(from, true)? {
                _ if self.messages.contains_key(&(to, attempt, from, tag)) => {}
                Visit::Waits(attempt, awaited) => self.obtain(from, attempt, awaited)?,
                Visit::Done(_) | Visit::Ready => {
                    return Err(PipelineError::setup(format!(
                        "rank {from} ends its step without sending {tag} to rank {to}, which waits for it"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Returns the number of the step.
    fn step(&self) -> StepNumber {
        StepNumber::new(self.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step())).next()
    }

    /// Makes a rank, restores it, and lets it compute until it waits for a message that is not in the list. Without
    /// `steps`, it ends before the step.
    fn visit(&mut self, rank: WorldRank, steps: bool) -> Result<Visit, PipelineError> {
        let ranks = self.program.ranks().saturating_mul(self.config.data_parallel);
        let (world, in_flight) = World::controlled(ranks);
        let (setup, endpoints) = Setup::new(self.program.clone(), world, &self.config)?;
        let own = |message: &(&Key, &Message)| message.0.0 == rank;
        for (_, message) in self.messages.iter().filter(own) {
            in_flight.deliver(rank, message.clone());
        }
        let endpoint = endpoints.into_iter().nth(rank.index()).ok_or(PipelineError::NoStepBegun)?;
        let memory = RankMemory::new();
        let mut executor =
            setup.build(endpoint, memory, &|stage, tensor: &TensorParallel| (self.make)(stage, tensor))?;
        setup.end_launch();
        let mut at = StepAttempt { step: self.step(), attempt: Attempt::default() };
        executor.begin_finding_shared(at.attempt);
        let mut poll = |executor: &mut Executor, attempt| {
            let polled = until_blocked(executor);
            self.messages.extend(sent(&in_flight));
            let awaited = polled?.then(|| setup.board.awaited_by(rank)).flatten();
            Ok::<_, PipelineError>(awaited.map(|awaited| Visit::Waits(attempt, awaited)))
        };
        if let Some(waits) = poll(&mut executor, at.attempt)? {
            return Ok(waits);
        }
        let failure = |cause| StepError { rank, step: at.step, action: None, cause };
        if let Some(checkpoint) = &self.checkpoint {
            executor.restore(&**checkpoint, false).map_err(failure)?;
        }
        self.before.insert(rank, executor.fingerprint().map_err(failure)?);
        if !steps {
            return Ok(Visit::Ready);
        }
        let of_checkpoint = self.checkpoint.as_ref().and_then(|checkpoint| checkpoint.loss_scale);
        let loss_scale = setup.loss_scale().map(|initial| of_checkpoint.unwrap_or(initial));
        let mut unit = None;
        for (number, batch) in (1..).zip(&self.batches) {
            let is_last = number == self.batches.len();
            let purpose = if is_last {
                Purpose::Update { learning_rate: self.learning_rate }
            } else {
                Purpose::Accumulate
            };
            at.attempt = at.attempt.next();
            let all = (0..ranks).map(WorldRank::new);
            let batch = CheckedBatch::new(&setup, all, batch.clone(), purpose)?;
            let unit = *unit.get_or_insert_with(|| batch.unit());
            let plan = StepPlan::training(at, &batch, unit, loss_scale, None);
            let inputs = plan.inputs_of(&setup, std::iter::once(rank), batch, (&StepOrigin::default(), None));
            inputs.into_iter().for_each(|input| executor.begin(input));
            if let Some(waits) = poll(&mut executor, at.attempt)? {
                return Ok(waits);
            }
            if is_last && let Some(report) = executor.take_outcome().reports.pop() {
                return Ok(Visit::Done(Box::new(report)));
            }
        }
        Err(PipelineError::NoStepBegun)
    }
}

/// Returns the hashes of a stage, whose ranks hold `leaves`.
fn of_stage(stage: StageIndex, leaves: impl IntoIterator<Item = (StageIndex, PartialLeaf)>) -> Fingerprint {
    let own = leaves.into_iter().filter(|(index, _)| *index == stage);
    Fingerprint::sum(own.map(|(_, leaf)| leaf))
}

/// Polls a rank until it waits for a message or is done. Returns whether it waits.
fn until_blocked(executor: &mut Executor) -> Result<bool, StepError> {
    loop {
        match caught(|| executor.poll()).unwrap_or_else(|cause| Err(executor.error(cause)))? {
            Poll::Progress => {}
            Poll::Pending => return Ok(true),
            Poll::Done => return Ok(false),
        }
    }
}

/// Takes out the messages that a rank has sent.
fn sent(in_flight: &InFlight) -> Vec<(Key, Message)> {
    let messages = in_flight.take_all().into_iter();
    messages.map(|(to, message)| ((to, message.attempt, message.from, message.tag), message)).collect()
}
