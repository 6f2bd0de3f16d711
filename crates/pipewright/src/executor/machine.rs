//! The executor: the parts of a rank, and the choice of its next action or phase.
//!
//! The executor owns the parts. `actions.rs` calls the handlers of the actions and `epilogue.rs` the handlers
//! of the phases, each with the parts that it uses. No other file reads the fields of the executor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::{Action, Event, Microbatch, StageIndex};

use super::accumulation::Accumulation;
use super::agreement::digest;
use super::checks::Checks;
use super::collection::Collection;
use super::connection::Connection;
use super::context::RankContext;
use super::failed_action::{Failure, locate};
use super::moves::{Arrivals, StageChange};
use super::overlap::Overlap;
use super::parameters::{KnownParameters, list_parameters};
use super::recorder::Recorder;
use super::reduction::Reductions;
use super::sharing::share_storage;
use super::stages::LocalStages;
use super::state::{fingerprint, restore, ruined_parameter, state};
use super::step::{Outcome, Phase, Poll, Step};
use super::step_input::StepInput;
use super::turns::BackwardThreads;
use crate::batch::StepForm;
use crate::checkpoint::{RankState, StageLeaves, StoredState};
use crate::collective::Exchange;
use crate::device::computes_behind;
use crate::failure::{Cause, FirstNotFinite, NotFiniteOrigin, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::message::Tag;
use crate::offload::Offloads;
use crate::progress::{Activity, Blocked};
use crate::stage::{FirstValue, RestoredPaths, StageRunner, Visit};
use crate::stream::Streams;
use crate::verification::Difference;

/// The state machine of one rank.
pub(crate) struct Executor {
    pub(super) context: RankContext,
    pub(super) connection: Connection,
    pub(super) stages: LocalStages,
    pub(super) parameters: KnownParameters,
    pub(super) accumulation: Accumulation,
    pub(super) reductions: Reductions,
    pub(super) recorder: Recorder,
    pub(super) checks: Checks,
    pub(super) backward_threads: BackwardThreads,
    /// Present if there is a place to which tensors can move.
    pub(super) offloads: Option<Offloads>,
    pub(super) streams: Streams,
    pub(super) step: Step,
    /// Across processes: the last batch that all ranks have, so that this one may begin it.
    pub(super) granted: Attempt,
    /// Present while batches overlap.
    pub(super) overlap: Option<Overlap>,
    /// The last two steps that have updated, and whether they have skipped the update.
    pub(super) last_updates: [(StepNumber, bool); 2],
}

impl Executor {
    /// Makes the executor of a rank. `stages` are the rank's, in local order; `microbatches` is the number of
    /// microbatches in a step that trains.
    pub(crate) fn new(
        context: RankContext,
        connection: Connection,
        stages: Vec<(StageIndex, Box<dyn StageRunner>)>,
        microbatches: u32,
    ) -> Self {
        Self {
            stages: LocalStages::new(&context, stages, microbatches),
            parameters: KnownParameters::default(),
            accumulation: Accumulation::default(),
            reductions: Reductions::default(),
            recorder: Recorder::new(context.timeline_row()),
            checks: Checks::default(),
            backward_threads: BackwardThreads::default(),
            offloads: context
                .config
                .offload
                .clone()
                .map(|place| Offloads::new(place, context.world_rank, connection.memory.clone())),
            streams: Streams::new(context.world_rank, connection.memory.clone()),
            step: Step::between(StepNumber::default(), Phase::Idle),
            granted: Attempt::default(),
            overlap: None,
            last_updates: Default::default(),
            context,
            connection,
        }
    }

    /// Starts a step.
    pub(crate) fn begin(&mut self, input: StepInput) {
        self.connection.begin(input.attempt);
        self.stages.select_version(self.context.config.delayed && !input.program.is_forward_only());
        self.connection.memory.restart_peak();
        self.start(input);
    }

    /// Counts microbatches of earlier batches of a step, on which random numbers depend, as if their gradients waited.
    pub(crate) fn skip_microbatches(&mut self, microbatches: u32) {
        self.accumulation.add(microbatches, 0.0);
    }

    /// Starts a step, whose attempt has begun.
    pub(super) fn start(&mut self, mut input: StepInput) {
        self.connection.set_step(input.step);
        let before = input.step.previous().previous();
        if self
            .last_updates
            .iter()
            .rev()
            .find(|(step, _)| *step == before)
            .is_some_and(|(_, skipped)| *skipped)
        {
            input.loss_scale = input.loss_scale_if_skipped;
        }
        if input.verification.is_some() {
            self.connection.note_exchange_sums();
        }
        let row = input.program.row(self.context.rank());
        let is_message = |action: &&Action| action.kind().is_send() || action.kind().is_receive();
        self.recorder.begin(input.origin.time(), row.len(), row.iter().filter(is_message).count());
        self.reductions.begin(input.repetition());
        let has_replicas = self.context.replica_count() > 1;
        self.stages.begin_step(&mut input, self.accumulation.is_empty(), has_replicas);
        self.checks.begin(&self.context, &self.stages, &input, self.accumulation);
        self.step = Step::new(input);
    }

    /// Starts an exchange between two steps that begins with `phase`.
    fn begin_between(&mut self, number: StepNumber, attempt: Attempt, phase: Phase) {
        self.connection.begin(attempt);
        self.recorder.begin(Instant::now(), 0, 0);
        self.step = Step::between(number, phase);
    }

    /// Starts the comparison of parameters that finds the shared ones; [`Executor::poll`] continues it.
    pub(crate) fn begin_finding_shared(&mut self, attempt: Attempt) {
        self.begin_between(StepNumber::default(), attempt, Phase::Idle);
        let listed = list_parameters(&self.context, &self.stages);
        let children = &self.context.model_tree.children;
        self.step.set_phase(Phase::ParameterLists(Exchange::gather(listed, Tag::Parameters, children)));
    }

    /// Starts to compare what this process knows of a step with the other processes.
    pub(crate) fn begin_agreeing(&mut self, step: StepNumber, attempt: Attempt, form: StepForm) {
        let children = &self.context.world_tree.children;
        let digests = Exchange::gather(Some(digest(&form)), Tag::StepDigest, children);
        self.begin_between(step, attempt, Phase::StepDigests { form, digests });
    }

    /// Starts to pass the bytes of the first rank to all ranks.
    pub(crate) fn begin_sharing(&mut self, attempt: Attempt, own: Arc<[u8]>) {
        let message = match self.context.world_tree.parent {
            Some(parent) => Exchange::one(parent, Tag::Shared),
            None => Exchange::complete(own),
        };
        self.begin_between(self.step.number, attempt, Phase::Shared(message));
    }

    /// Starts to move layers between stages.
    pub(crate) fn begin_moving(&mut self, attempt: Attempt, change: Arc<StageChange>) -> Result<(), Cause> {
        self.stages.forget_buffers();
        self.begin_between(self.step.number, attempt, Phase::Idle);
        let Self { context, connection, stages, .. } = self;
        if let Some(hook) = context.hook() {
            hook.begin_move(context.world_rank);
        }
        let arrivals = Arrivals::begin(context, connection, stages, change)?;
        self.step.set_phase(Phase::Layers(Box::new(arrivals)));
        Ok(())
    }

    /// Starts to collect the whole parameters of all stages, or to visit their modules. If parameters are
    /// sharded, all replicas do so together.
    pub(crate) fn begin_collecting(&mut self, attempt: Attempt, visit: Option<Visit>) {
        self.stages.begin_visit(self.accumulation.is_empty());
        self.begin_between(self.step.number, attempt, Phase::Idle);
        let phase = self.collect_next(Collection::new(visit));
        self.step.set_phase(phase);
    }

    /// Runs the next action or phase that can run, or returns that it waits for a message to arrive or to
    /// leave.
    pub(crate) fn poll(&mut self) -> Result<Poll, StepError> {
        self.advance().map_err(|cause| {
            // No other rank depends on them, and the error looks at the parameters.
            self.stages.undo_updates();
            self.error(cause)
        })
    }

    fn advance(&mut self) -> Result<Poll, Cause> {
        if let Some(first) = self.connection.stopped_by() {
            return Err(Cause::Aborted { first });
        }
        // A waiting executor is not polled, so its status on the board stays valid until a message arrives.
        if self.step.set_waits(false) {
            self.connection.set_activity(Activity::Computes);
        }
        self.reductions.advance(&self.context, &mut self.connection, &mut self.stages)?;
        let blocked = match &self.step.phase {
            Phase::Actions => self.poll_action()?,
            Phase::Idle | Phase::Done(_) => {
                self.connection.set_activity(Activity::NoStep);
                return Ok(Poll::Done);
            }
            _ => self.poll_epilogue()?.map(Blocked::from),
        };
        let Some(blocked) = blocked else { return Ok(Poll::Progress) };
        self.step.set_waits(true);
        self.connection.set_activity(blocked.into());
        Ok(Poll::Pending)
    }

    /// Takes out the results of a step or of an exchange that is done.
    pub(crate) fn take_outcome(&mut self) -> Outcome {
        match self.step.take_phase() {
            Phase::Done(outcome) => outcome,
            _ => Outcome::default(),
        }
    }

    /// Returns whether the rank has begun to update its parameters in this step.
    pub(crate) fn has_updated(&self) -> bool {
        self.step.updates.is_some()
    }

    /// Returns the last batch that all ranks of all processes have, as far as the gradient norms have said so.
    pub(crate) fn granted(&self) -> Attempt {
        self.granted
    }

    /// Sleeps until a message arrives or a rank fails. The deadline starts again whenever any rank of the
    /// world moves.
    pub(crate) fn wait_for_message(&mut self) -> Result<(), StepError> {
        self.connection.wait().map_err(|cause| self.error(cause))
    }

    /// Returns the time without progress after which a step fails.
    pub(crate) fn deadline(&self) -> Duration {
        self.context.config.deadline
    }

    /// Returns the parameters and optimizer state of all stages.
    pub(crate) fn state(&self) -> RankState {
        state(&self.context, &self.connection, &self.stages, &self.parameters)
    }

    /// Returns the hashes of the trained parameters that the rank holds.
    pub(crate) fn fingerprint(&self) -> Result<StageLeaves, Cause> {
        fingerprint(&self.context, &self.stages, &self.parameters)
    }

    /// Returns the hashes if the fingerprint of the step is due.
    pub(super) fn fingerprint_if_due(&self) -> Result<Option<StageLeaves>, Cause> {
        let every = self.context.config.fingerprint_every;
        // Steps are counted from 1, so no step is a multiple of 0.
        self.step.number.get().is_multiple_of(every).then(|| self.fingerprint()).transpose()
    }

    /// Restores the state of all stages, and drops gradients that wait for an update, which belong to the old
    /// parameters. Running statistics that the checkpoint does not have stay.
    pub(crate) fn restore(
        &mut self,
        stored: &dyn StoredState,
        may_miss: bool,
    ) -> Result<RestoredPaths, Cause> {
        self.stages.forget_buffers();
        self.reset();
        let restored = restore(&self.context, &self.connection, &mut self.stages, stored, may_miss);
        share_storage(&self.context, &mut self.stages, &self.parameters);
        if self.context.config.delayed {
            self.stages.switch();
            share_storage(&self.context, &mut self.stages, &self.parameters);
            self.stages.switch();
        }
        restored
    }

    /// Drops all data of a failed step, so that the next step starts without it.
    pub(crate) fn reset(&mut self) {
        if let Some(action) = self.step.action(self.context.rank()) {
            // The action that failed, or that the rank stopped in, has sent tokens too.
            self.note_exchange_sums(action);
        }
        self.overlap = None;
        self.granted = Attempt::default();
        self.stages.reset();
        self.accumulation = Accumulation::default();
        self.reductions.clear();
        if let Some(offloads) = &mut self.offloads {
            offloads.clear();
        }
        self.streams.clear();
        self.step = Step::between(StepNumber::default(), Phase::Idle);
        self.connection.set_activity(Activity::NoStep);
    }

    /// Takes out the first result that differs, of a repetition whose bits were confirmed before it failed.
    pub(crate) fn take_difference(&mut self) -> Option<Difference> {
        self.checks.take_difference()
    }

    /// Takes out the events of a step that failed. If this rank failed, its current action is the last one.
    pub(crate) fn failed_events(&mut self, is_own: bool) -> Vec<Event> {
        if let Some(action) = self.step.action(self.context.rank()).filter(|_| is_own) {
            self.recorder.note(action);
        }
        self.recorder.take(&self.connection.memory).events
    }

    /// Returns the number of actions of the step that are done.
    pub(crate) fn position(&self) -> usize {
        self.step.position
    }

    /// Returns the progress of all ranks, one line for each.
    pub(crate) fn progress_report(&self) -> String {
        self.connection.progress_report()
    }

    /// Raises an error for all ranks.
    pub(crate) fn fail(&self, error: StepError) {
        self.connection.fail(error);
    }

    /// Makes an error of this rank at its current position in the step.
    pub(crate) fn error(&self, cause: Cause) -> StepError {
        let row = self.step.row(self.context.rank());
        let failure = Failure {
            row,
            action: self.step.action(self.context.rank()),
            has_run: !row.is_empty() && self.step.position >= row.len(),
            updates: self.step.updates,
            computes_behind: self.stages.iter().any(|stage| computes_behind(stage.runner().device())),
        };
        let cause =
            if self.step.searches() { self.searched(cause) } else { self.suspicious(self.explain(cause)) };
        let (action, cause) = locate(&failure, cause);
        StepError { rank: self.world_rank(), step: self.step.number, action, cause }
    }

    /// Returns the deeper cause of a number that is not finite: a parameter that an earlier update has
    /// ruined.
    fn explain(&self, cause: Cause) -> Cause {
        let ruined = if cause.is_number() { ruined_parameter(&self.context, &self.stages) } else { None };
        ruined.map_or(cause, |(parameter, found)| Cause::ParameterNotFinite { parameter, found })
    }

    /// Returns the end of a step that is computed again to find the first value that is not finite.
    fn searched(&self, cause: Cause) -> Cause {
        let origin = match &cause {
            Cause::Stage(error) => error.first_not_finite().and_then(|value| self.first_not_finite(value)),
            // The layers have shown no such value.
            cause if cause.is_number() => Some(NotFiniteOrigin::Sum),
            _ => None,
        };
        origin.map_or(cause, |origin| Cause::Search { origin: Box::new(origin) })
    }

    /// Returns the place of the first value that is not finite, which the action of the rank has found.
    fn first_not_finite(&self, value: &FirstValue) -> Option<NotFiniteOrigin> {
        let action = self.step.action(self.context.rank())?;
        let is_backward = |part: &Action| !matches!(part, Action::Forward { .. });
        let part = action.parts().find(|part| is_backward(part) == value.is_gradient()).unwrap_or(action);
        let input = self.step.input();
        let number = input.first_microbatch() + part.microbatch()?.get();
        let (microbatch, _) = input.program.slices().place(Microbatch::new(number));
        Some(NotFiniteOrigin::First(FirstNotFinite {
            value: value.clone(),
            stage: part.stage(),
            microbatch,
            rank: self.world_rank(),
            parameter: ruined_parameter(&self.context, &self.stages),
        }))
    }

    /// Returns [`Cause::Suspicious`] if the first computation of a verified step has failed with a suspicious
    /// cause, and otherwise the cause itself.
    fn suspicious(&self, cause: Cause) -> Cause {
        let repeats = self.step.is_first_of_verified();
        let suspicion = cause.suspicion().filter(|_| repeats);
        suspicion.map_or(cause, |suspicion| Cause::Suspicious { suspicion })
    }

    /// Returns this rank as a rank of the world, which reports and errors name.
    pub(crate) fn world_rank(&self) -> WorldRank {
        self.context.world_rank
    }
}
