//! The executor: the state of a rank, and the choice of its next action or phase.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use pipewright_schedule::{Action, Event, Placement, Rank, Recompute, StageIndex, ValidatedProgram};

use super::gather::{NamedParameter, Visited};
use super::local_stage::LocalStage;
use super::mesh_endpoint::MeshEndpoint;
use super::parameters::KnownParameters;
use super::place::{Situation, place};
use super::report::RankReport;
use super::step::{Outcome, Phase, Poll, StepInput, StepState};
use crate::device::computes_behind;
use crate::failure::{Cause, StepError};
use crate::hook::ActionHook;
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::memory::RankMemory;
use crate::message::{AwaitedMessage, Tag};
use crate::optimizer::{ClipGroup, GradientHook};
use crate::progress::{Activity, Blocked, ProgressBoard};
use crate::stage::{StageError, StageRunner, Visit};
use crate::tensor::{Boundaries, CheckMetadata, Metadata, OnMismatch};

/// The settings that an executor gets from its pipeline.
pub(crate) struct ExecutorConfig {
    /// The program until the first step. Each step brings its own (`StepInput::program`).
    pub(crate) program: Arc<ValidatedProgram>,
    /// The largest number of microbatches of any program.
    pub(crate) most_microbatches: u32,
    pub(crate) board: ProgressBoard,
    pub(crate) metadata: Metadata,
    pub(crate) check_metadata: CheckMetadata,
    pub(crate) on_mismatch: OnMismatch,
    pub(crate) seed: u64,
    pub(crate) clip_norm: Option<f64>,
    pub(crate) clip_groups: Arc<[ClipGroup]>,
    pub(crate) gradient_hook: Option<Arc<dyn GradientHook>>,
    pub(crate) recompute: Recompute,
    pub(crate) hook: Option<Arc<dyn ActionHook>>,
    pub(crate) interrupt: Option<Arc<AtomicBool>>,
}

/// The state of one rank in a step.
pub(crate) struct Executor {
    /// The rank in its pipeline: the row of the program that it runs.
    pub(super) rank: Rank,
    /// The rank in the world, which reports and errors name.
    pub(crate) world_rank: WorldRank,
    pub(super) stages: Vec<LocalStage>,
    pub(super) endpoint: MeshEndpoint,
    /// The seed of the random numbers that layers draw.
    pub(super) seed: u64,
    pub(super) clip_norm: Option<f64>,
    pub(super) clip_groups: Arc<[ClipGroup]>,
    pub(super) gradient_hook: Option<Arc<dyn GradientHook>>,
    /// The stages that compute their forward again.
    pub(super) recompute: Recompute,
    pub(super) memory: RankMemory,
    pub(super) board: ProgressBoard,
    /// The flag that ends training after the current step.
    pub(super) interrupt: Option<Arc<AtomicBool>>,
    pub(super) hook: Option<Arc<dyn ActionHook>>,
    pub(super) on_mismatch: OnMismatch,
    /// Microbatches of earlier steps whose gradients are in the sums.
    pub(super) accumulated: u32,
    /// The sum of their divisors.
    pub(super) accumulated_divisor: f64,
    /// The parameters of the pipeline; `None` until the ranks have compared theirs at launch.
    pub(super) parameters: Option<KnownParameters>,
    /// The visit to the modules, instead of collecting their parameters.
    pub(super) visit: Option<Visit>,
    pub(super) visited: Visited,
    pub(super) step: StepState,
}

impl Executor {
    /// Makes the executor of `endpoint`'s rank; `stages` are that rank's, in local order.
    pub(crate) fn new(
        config: ExecutorConfig,
        endpoint: MeshEndpoint,
        stages: Vec<(StageIndex, Box<dyn StageRunner>)>,
        memory: RankMemory,
    ) -> Self {
        let microbatches = config.program.microbatches();
        let stages = stages.into_iter().map(|(index, runner)| {
            let boundaries = Boundaries::new(&config.metadata, config.check_metadata, index, microbatches);
            LocalStage::new(index, runner, config.most_microbatches, boundaries)
        });
        Self {
            rank: endpoint.coord().rank,
            world_rank: endpoint.world_rank(),
            stages: stages.collect(),
            endpoint,
            seed: config.seed,
            clip_norm: config.clip_norm,
            clip_groups: config.clip_groups,
            gradient_hook: config.gradient_hook,
            recompute: config.recompute,
            memory,
            board: config.board,
            hook: config.hook,
            on_mismatch: config.on_mismatch,
            interrupt: config.interrupt,
            accumulated: 0,
            accumulated_divisor: 0.0,
            parameters: None,
            visit: None,
            visited: Visited::default(),
            step: StepState::new(StepInput::empty(StepNumber::default(), config.program)),
        }
    }

    /// Starts a step.
    pub(crate) fn begin(&mut self, mut input: StepInput) {
        self.endpoint.begin_step(input.attempt);
        self.memory.restart_peak();
        let inputs = std::mem::take(&mut input.inputs);
        let targets = std::mem::take(&mut input.targets);
        self.step = StepState::new(input);
        self.step.phase = Phase::Actions;
        self.step.events.reserve(self.program().row(self.rank).len());
        let is_training = !self.program().is_forward_only() && self.endpoint.replica_count() > 1;
        for stage in &mut self.stages {
            stage.gathers = 0;
            stage.boundaries.begin_step();
            // All batches whose gradients are accumulated are one step.
            if self.accumulated == 0 {
                stage.runner.keep_buffers(!self.step.input.program.is_forward_only());
            }
            if is_training {
                stage.runner.note_statistics();
            }
        }
        self.board.set_activity(self.world_rank, Activity::Computes);
        self.board.moved(self.world_rank, 0);
        let first = self.stages.first_mut().expect("every rank owns a stage");
        inputs.into_iter().zip(&mut first.inputs).for_each(|(values, place)| *place = Some(values));
        let last = self.stages.last_mut().expect("every rank owns a stage");
        targets.into_iter().zip(&mut last.targets).for_each(|(values, place)| *place = Some(values));
    }

    /// Runs the next action or phase that can run, or returns that it waits for a message to arrive or to leave.
    pub(crate) fn poll(&mut self) -> Result<Poll, StepError> {
        if self.endpoint.abort().is_raised() {
            let first = self.endpoint.abort().first().map_or(self.world_rank, |error| error.rank);
            return Err(self.error(Cause::Aborted { first }));
        }
        // A waiting executor is not polled, so its status on the board stays valid until a message arrives.
        if std::mem::take(&mut self.step.waits) {
            self.board.set_activity(self.world_rank, Activity::Computes);
        }
        if !self.step.reductions.is_empty() {
            self.advance_reductions().map_err(|cause| self.error(cause))?;
        }
        let blocked = match self.step.phase {
            Phase::Actions => self.poll_action(),
            Phase::Idle | Phase::Done(_) => {
                self.board.set_activity(self.world_rank, Activity::NoStep);
                return Ok(Poll::Done);
            }
            _ => self.poll_epilogue().map(|awaited| awaited.map(Blocked::from)),
        };
        match blocked {
            Ok(None) => Ok(Poll::Progress),
            Ok(Some(blocked)) => {
                self.step.waits = true;
                self.board.set_activity(self.world_rank, blocked.into());
                Ok(Poll::Pending)
            }
            Err(cause) => Err(self.error(cause)),
        }
    }

    fn poll_action(&mut self) -> Result<Option<Blocked>, Cause> {
        let Some(&action) = self.program().row(self.rank).get(self.step.position) else {
            return self.poll_epilogue().map(|awaited| awaited.map(Blocked::from));
        };
        if self.step.entered.is_none() {
            self.step.entered = Some(Instant::now());
            if let Some(hook) = &self.hook {
                hook.before(self.world_rank, action);
            }
        }
        if let Some(sending) = self.unsent(action) {
            return Ok(Some(Blocked::Sending(sending)));
        }
        if let Some(awaited) = self.act_in_scope(action)? {
            return Ok(Some(Blocked::Receiving(awaited)));
        }
        // The event of a receive is added when its message is taken. It lasts from the first attempt to take the message
        // until its arrival.
        let is_noted_later = match action {
            Action::RecvForward { .. } | Action::RecvBackward { .. } => true,
            Action::Unshard { stage } => {
                self.endpoint.row_shard().is_some()
                    && (self.hook.is_none() || self.local_stage(stage).gathering.is_some())
            }
            _ => false,
        };
        if !is_noted_later {
            self.note_event(action);
        }
        if let Some(hook) = &self.hook {
            hook.after(self.world_rank, action);
        }
        self.step.entered = None;
        self.step.position += 1;
        self.board.moved(self.world_rank, self.step.position);
        Ok(None)
    }

    /// Adds the event of an action that has just ended: from its first attempt until the current time.
    fn note_event(&mut self, action: Action) {
        let origin = self.step.input.origin;
        let entered = self.step.entered.unwrap_or_else(Instant::now);
        self.step.events.push(Event {
            rank: self.endpoint.timeline_row(),
            action,
            start: entered.saturating_duration_since(origin).as_secs_f64(),
            end: origin.elapsed().as_secs_f64(),
        });
    }

    /// Adds the event of a forward that a backward computed again from `start` on. The event of the backward begins
    /// after it, so that the two do not overlap. Blocks are recomputed alternately with their backwards, and the event
    /// has their times together.
    pub(super) fn note_recomputed(&mut self, forward: Action, start: Instant, recomputed: Duration) {
        let origin = self.step.input.origin;
        let begin = start.saturating_duration_since(origin);
        self.step.events.push(Event {
            rank: self.endpoint.timeline_row(),
            action: forward,
            start: begin.as_secs_f64(),
            end: (begin + recomputed).as_secs_f64(),
        });
        self.step.entered = Some(start + recomputed);
    }

    /// Adds the event of a receive whose message has just been taken. The computation that uses it begins now.
    pub(super) fn note_received(&mut self, action: Action) {
        self.note_event(action);
        self.step.entered = Some(Instant::now());
    }

    /// Starts the comparison of parameters that finds the shared ones; [`Executor::poll`] continues it.
    pub(crate) fn begin_finding_shared(&mut self, attempt: Attempt) {
        self.endpoint.begin_step(attempt);
        let input = StepInput::empty(StepNumber::default(), self.step.input.program.clone());
        self.step = StepState::new(StepInput { attempt, ..input });
        self.step.phase = self.list_parameters();
        self.board.set_activity(self.world_rank, Activity::Computes);
    }

    /// Starts to collect the whole parameters of all stages, or to visit their modules. If parameters are sharded, all
    /// replicas do so together.
    pub(crate) fn begin_collect(&mut self, attempt: Attempt, visit: Option<Visit>) {
        (self.visit, self.visited) = (visit, Visited::default());
        self.endpoint.begin_step(attempt);
        let input = StepInput::empty(self.step.input.step, self.step.input.program.clone());
        self.step = StepState::new(StepInput { attempt, ..input });
        for stage in &mut self.stages {
            stage.gathers = 0;
            if self.accumulated == 0 {
                stage.runner.keep_buffers(false);
            }
        }
        self.step.phase = self.begin_collecting(0, Vec::new());
        self.board.set_activity(self.world_rank, Activity::Computes);
    }

    /// Returns the results of the visit. Call once, when all stages are visited.
    pub(crate) fn visited(&mut self) -> Visited {
        self.take_outcome();
        self.visit = None;
        std::mem::take(&mut self.visited)
    }

    /// Returns the collected parameters. Call once, when they are collected.
    pub(crate) fn collected(&mut self) -> Vec<NamedParameter> {
        self.take_outcome().collected
    }

    /// Returns this rank's report on the step, and across processes then those of all other ranks. Call once, when the
    /// step is done.
    pub(crate) fn reports(&mut self) -> Vec<RankReport> {
        self.take_outcome().reports
    }

    pub(super) fn take_outcome(&mut self) -> Outcome {
        match std::mem::take(&mut self.step.phase) {
            Phase::Done(outcome) => outcome,
            _ => Outcome::default(),
        }
    }

    /// Returns whether the rank has begun to update its parameters in this step.
    pub(crate) fn has_updated(&self) -> bool {
        self.step.updates.is_some()
    }

    /// Drops all data of a failed step, so that the next step starts without it.
    pub(crate) fn reset(&mut self) {
        self.stages.iter_mut().for_each(LocalStage::reset);
        (self.accumulated, self.accumulated_divisor) = (0, 0.0);
        self.step = StepState::new(StepInput::empty(StepNumber::default(), self.step.input.program.clone()));
        self.board.set_activity(self.world_rank, Activity::NoStep);
    }

    /// Takes out the events of a step that failed. If this rank failed, its current action is the last one.
    pub(crate) fn failed_events(&mut self, is_own: bool) -> Vec<Event> {
        let current = self.program().row(self.rank).get(self.step.position).copied();
        if let (true, Phase::Actions, Some(action)) = (is_own, &self.step.phase, current) {
            self.note_event(action);
        }
        let events = std::mem::take(&mut self.step.events);
        self.memory.give_away_list(&events);
        events
    }

    /// Makes an error of this rank at its current position in the step.
    pub(crate) fn error(&self, cause: Cause) -> StepError {
        let row = self.program().row(self.rank);
        let situation = Situation {
            row,
            action: match self.step.phase {
                Phase::Actions => row.get(self.step.position).copied(),
                _ => None,
            },
            has_run: self.step.position >= row.len(),
            updates: self.step.updates,
            computes_behind: self.stages.iter().any(|stage| computes_behind(stage.runner.device())),
        };
        let (action, cause) = place(&situation, self.explained(cause));
        StepError { rank: self.world_rank, step: self.step.input.step, action, cause }
    }

    /// Returns the deeper cause of a number that is not finite: a parameter that an earlier update has ruined.
    fn explained(&self, cause: Cause) -> Cause {
        let is_number = match &cause {
            Cause::LossNotFinite { .. }
            | Cause::AuxiliaryNotFinite { .. }
            | Cause::GradientNotFinite { .. } => true,
            Cause::Stage(error) => matches!(error, StageError::NotFinite { .. }),
            _ => false,
        };
        let ruined = if is_number { self.ruined_parameter() } else { None };
        ruined.map_or(cause, |(parameter, found)| Cause::ParameterNotFinite { parameter, found })
    }

    pub(crate) fn endpoint(&mut self) -> &mut MeshEndpoint {
        &mut self.endpoint
    }

    /// Returns the program of the step.
    pub(super) fn program(&self) -> &ValidatedProgram {
        &self.step.input.program
    }

    /// Returns the placement of the stages, which is the same in every program of the pipeline.
    pub(super) fn placement(&self) -> &Placement {
        self.program().placement()
    }

    pub(super) fn local_stage(&mut self, stage: StageIndex) -> &mut LocalStage {
        let place = self.placement().chunk_of(stage).index();
        &mut self.stages[place]
    }

    /// Describes a message from a rank of this pipeline.
    pub(super) fn awaited(&self, from: Rank, tag: Tag) -> AwaitedMessage {
        AwaitedMessage { from: self.endpoint.world_rank_of(from), tag }
    }

    /// Returns the rank of `stage` in this pipeline; `None` if it is this rank.
    pub(super) fn elsewhere(&self, stage: StageIndex) -> Option<Rank> {
        Some(self.placement().rank_of(stage)).filter(|&rank| rank != self.rank)
    }

    pub(super) fn is_last(&self, stage: StageIndex) -> bool {
        stage == self.placement().last_stage()
    }
}
