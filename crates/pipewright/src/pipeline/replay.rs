//! [`StepReplay`]: computes ranks of one step again, with one rank or one group of ranks in memory at a time.
//!
//! A replayed rank is made, restored and polled as in a run. Its messages come from a list, and what it sends to others is added
//! to the list. If it waits for a message that is not in the list, it is dropped, the sender is replayed until it has sent the
//! message, and then the rank begins again:
//!
//! ```text
//! compute(r): replay r --done--> its report
//!               ^  |
//!               |  +--waits for a message of q--> drop r; replay q until it has sent it --+
//!               +---------------------------------------------------------------------------+
//! ```
//!
//! Ranks that exchange messages inside of an action are replayed together, as one: the tensor ranks of a stage, and the
//! replicas that hold experts together (`replayed_ranks.rs`). The list does not have the messages among them, which
//! they send each other again.
//!
//! A rank computes the same bits each time, so it sends the same messages. The list holds the tensors of all boundaries
//! that were sent so far; parameters and activations are in memory for one rank only. With GPipe, a rank waits for the forwards
//! of the ranks before it, for the backwards of the ranks after it, and for the norm, so it begins a few times. With
//! other schedules it waits more often.
//!
//! With several batches per update, a rank first computes each batch alone: no batch needs the gradients of another one. When
//! the list has the messages of all batches, the rank computes the step as a whole and waits only for the messages of the
//! update. So the time grows with the number of batches.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::sync::Arc;

use pipewright_schedule::{StageIndex, ValidatedProgram};

use super::accumulation::Accumulation;
use super::error::PipelineError;
use super::replayed_ranks::{Key, Replayed, ReplayedRanks};
use super::setup::Setup;
use super::step_plan::{CheckedBatch, StepAttempt, StepPlan};
use crate::batch::{Batch, Purpose};
use crate::checkpoint::{Checkpoint, Fingerprint, PartialLeaf, StageLeaves};
use crate::config::PipelineConfig;
use crate::executor::{RankReport, StepInput, StepOrigin};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::mesh::{MeshCoord, RankGroups};
use crate::message::{AwaitedMessage, Message};
use crate::nn::TensorParallel;
use crate::stage::Stage;
use crate::transport::World;

/// A step that is computed again, one rank or one group of ranks at a time.
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
    /// The ranks that have sent the messages of all batches.
    sent: BTreeSet<WorldRank>,
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

/// The part of a step that a rank computes.
#[derive(Clone, Copy)]
enum StepPart {
    /// Nothing: the rank gets its state before the step.
    State,
    /// The batch with this index, without an update.
    Batch(usize),
    /// All batches and the update.
    Whole,
}

/// How far replayed ranks came.
enum Visit {
    /// They have computed their part. The reports are of the whole step.
    Done(Vec<RankReport>),
    /// They wait for messages of other ranks.
    Waits(Vec<(WorldRank, Attempt, AwaitedMessage)>),
}

impl<F, E> StepReplay<F>
where
    F: Fn(StageIndex, &TensorParallel) -> Result<Stage, E> + Sync,
    E: Display,
{
    /// Replays the step after a checkpoint, or the first one if there is none. `make` makes a stage as for
    /// [`Pipeline::launch_split`](super::Pipeline::launch_split), each time that a rank begins.
    pub fn new(
        program: ValidatedProgram,
        config: PipelineConfig,
        checkpoint: Option<Arc<Checkpoint>>,
        step: ReplayedBatches,
        make: F,
    ) -> Self {
        let config = PipelineConfig { fingerprint_every: 1, ..config };
        let ReplayedBatches { batches, learning_rate } = step;
        let (messages, before, sent) = (HashMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { program, config, make, checkpoint, batches, learning_rate, messages, before, sent }
    }

    /// Returns the state of a stage before the step.
    ///
    /// # Errors
    /// When a stage cannot be made or restored.
    pub fn state_before(&mut self, stage: StageIndex) -> Result<Fingerprint, PipelineError> {
        for rank in self.holders_of(stage) {
            if !self.before.contains_key(&rank) {
                self.compute_part(rank, StepPart::State)?;
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
        let mut missing = self.holders_of(stage);
        while let Some(&rank) = missing.first() {
            for mut report in self.compute(rank)? {
                if let Some(index) = missing.iter().position(|other| *other == report.rank) {
                    missing.remove(index);
                    gradient_norm = report.results.gradient_norm.unwrap_or_default();
                    leaves.extend(report.fingerprint.take().unwrap_or_default());
                }
            }
        }
        Ok(ReplayedStage { fingerprint: of_stage(stage, leaves), gradient_norm })
    }

    /// Returns all ranks with their coordinates.
    fn ranks(&self) -> impl Iterator<Item = (WorldRank, MeshCoord)> + use<F, E> {
        let mesh = self.config.mesh(self.program.ranks());
        let ranks = mesh.ranks().unwrap_or_default();
        (0..ranks).map(WorldRank::new).map(move |rank| (rank, mesh.coord(rank)))
    }

    /// Returns the ranks that hold a stage together, of the first replicas.
    fn holders_of(&self, stage: StageIndex) -> Vec<WorldRank> {
        let mesh = self.config.mesh(self.program.ranks());
        let (rank, replicas) = (self.program.placement().rank_of(stage), mesh.shards.max(mesh.experts));
        let holders = self.ranks().filter(|(_, coord)| coord.rank == rank && coord.replica < replicas);
        holders.map(|(rank, _)| rank).collect()
    }

    /// Returns the ranks that exchange messages with a rank inside of an action, with this rank.
    fn group_of(&self, rank: WorldRank) -> Vec<WorldRank> {
        let group = self.config.mesh(self.program.ranks()).action_group(rank);
        group.map(|group| group.members().to_vec()).unwrap_or_default()
    }

    fn known_before(&self, stage: StageIndex) -> Fingerprint {
        let holders = self.holders_of(stage);
        let known = holders.iter().filter_map(|rank| self.before.get(rank));
        of_stage(stage, known.flatten().cloned())
    }

    /// Replays a rank's group until it has done its part of the step.
    fn compute(&mut self, rank: WorldRank) -> Result<Vec<RankReport>, PipelineError> {
        self.send_batches(rank)?;
        let reports = self.compute_part(rank, StepPart::Whole)?;
        if reports.iter().any(|report| report.rank == rank) {
            Ok(reports)
        } else {
            Err(PipelineError::NoStepBegun)
        }
    }

    /// Lets a rank send the messages of all batches, if there are several.
    fn send_batches(&mut self, rank: WorldRank) -> Result<(), PipelineError> {
        if self.batches.len() > 1 && !self.sent.contains(&rank) {
            for index in 0..self.batches.len() {
                self.compute_part(rank, StepPart::Batch(index))?;
            }
            self.sent.extend(self.group_of(rank));
        }
        Ok(())
    }

    /// Replays a rank's group until it has computed a part.
    fn compute_part(&mut self, rank: WorldRank, part: StepPart) -> Result<Vec<RankReport>, PipelineError> {
        loop {
            match self.visit(rank, part)? {
                Visit::Done(reports) => return Ok(reports),
                Visit::Waits(awaited) => self.obtain(awaited, part)?,
            }
        }
    }

    /// Replays the senders of messages, for which ranks wait in a part of the step, until they have sent them.
    fn obtain(
        &mut self,
        awaited: Vec<(WorldRank, Attempt, AwaitedMessage)>,
        part: StepPart,
    ) -> Result<(), PipelineError> {
        // A sender of the same group waits itself.
        let is_outside =
            |(to, _, awaited): &(_, _, AwaitedMessage)| !self.group_of(*to).contains(&awaited.from);
        let outside: Vec<_> = awaited.iter().filter(|awaited| is_outside(awaited)).copied().collect();
        if let (true, Some((to, _, AwaitedMessage { from, tag }))) = (outside.is_empty(), awaited.first()) {
            return Err(PipelineError::setup(format!(
                "rank {to} waits for {tag} of rank {from}, which waits too"
            )));
        }
        for (to, attempt, AwaitedMessage { from, tag }) in outside {
            if matches!(part, StepPart::Whole) {
                self.send_batches(from)?;
            }
            let is_sent = |replay: &Self| replay.messages.contains_key(&(to, attempt, from, tag));
            while !is_sent(self) {
                match self.visit(from, part)? {
                    _ if is_sent(self) => {}
                    Visit::Waits(awaited) => self.obtain(awaited, part)?,
                    Visit::Done(_) => {
                        return Err(PipelineError::setup(format!(
                            "rank {from} ends its step without sending {tag} to rank {to}, which waits for it"
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the number of the step.
    fn step(&self) -> StepNumber {
        StepNumber::new(self.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step())).next()
    }

    /// Makes a rank's group, restores it, and lets it compute a part until it waits for messages that are not in the list.
    fn visit(&mut self, rank: WorldRank, part: StepPart) -> Result<Visit, PipelineError> {
        let group = self.group_of(rank);
        let (world, in_flight) = World::controlled(u32::try_from(self.ranks().count()).unwrap_or_default());
        let (setup, endpoints) = Setup::new(self.program.clone(), world, &self.config)?;
        // The ranks of the group send each other their messages again.
        let is_from_outside = |(to, _, from, _): &Key| group.contains(to) && !group.contains(from);
        for (key, message) in self.messages.iter().filter(|(key, _)| is_from_outside(key)) {
            in_flight.deliver(key.0, message.clone());
        }
        let mut inputs = self.inputs_of(&setup, &group, part)?.into_iter();
        let own = endpoints.into_iter().filter(|endpoint| group.contains(&endpoint.rank()));
        let ranks = ReplayedRanks {
            setup: &setup,
            in_flight: &in_flight,
            ranks: own.map(|endpoint| (endpoint, inputs.next().unwrap_or_default())).collect(),
            step: self.step(),
            skipped: if let StepPart::Batch(index) = part {
                index as u32 * self.program.microbatches()
            } else {
                0
            },
            make: &self.make,
            checkpoint: self.checkpoint.as_deref(),
            hashes: group.iter().any(|rank| !self.before.contains_key(rank)),
        };
        let Replayed { before, sent, awaited, reports } =
            ranks.run(|key| is_from_outside(key) && self.messages.contains_key(key))?;
        self.before.extend(before);
        self.messages.extend(sent);
        Ok(if awaited.is_empty() { Visit::Done(reports) } else { Visit::Waits(awaited) })
    }

    /// Returns the batches that each rank of a group computes in a part of the step.
    fn inputs_of(
        &self,
        setup: &Setup,
        group: &[WorldRank],
        part: StepPart,
    ) -> Result<Vec<Vec<StepInput>>, PipelineError> {
        let indices = match part {
            StepPart::State => 0..0,
            StepPart::Batch(index) => index..index + 1,
            StepPart::Whole => 0..self.batches.len(),
        };
        let of_checkpoint = self.checkpoint.as_ref().and_then(|checkpoint| checkpoint.loss_scale);
        let scale = Accumulation::new(&setup.config, of_checkpoint).step_scale(0, &setup.config);
        let checked = |index: usize, purpose| {
            let all = self.ranks().map(|(rank, _)| rank);
            CheckedBatch::new(setup, all, self.batches[index].clone(), purpose)
        };
        let mut inputs: Vec<Vec<StepInput>> = group.iter().map(|_| Vec::new()).collect();
        for index in indices {
            let is_last = matches!(part, StepPart::Whole) && index + 1 == self.batches.len();
            let purpose = if is_last {
                Purpose::Update { learning_rate: self.learning_rate }
            } else {
                Purpose::Accumulate
            };
            let unit = checked(0, purpose)?.unit();
            let at = StepAttempt { step: self.step(), attempt: Attempt::new(index as u64 + 1) };
            let batch = checked(index, purpose)?;
            let plan = StepPlan::training(at, &batch, unit, scale, None);
            let of_group =
                plan.inputs_of(setup, group.iter().copied(), batch, (&StepOrigin::default(), None));
            inputs.iter_mut().zip(of_group).for_each(|(inputs, input)| inputs.push(input));
        }
        Ok(inputs)
    }
}

/// Returns the hashes of a stage, whose ranks hold `leaves`.
fn of_stage(stage: StageIndex, leaves: impl IntoIterator<Item = (StageIndex, PartialLeaf)>) -> Fingerprint {
    let own = leaves.into_iter().filter(|(index, _)| *index == stage);
    Fingerprint::sum(own.map(|(_, leaf)| leaf))
}
