//! The executor: what a rank has, and the next thing that it does.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use pipewright_schedule::{Action, Event, Rank, StageIndex, ValidatedProgram};

use super::gather::NamedParameter;
use super::local_stage::LocalStage;
use super::mesh_endpoint::MeshEndpoint;
use super::report::RankReport;
use super::sharing::Shared;
use super::step::{Phase, Poll, StepInput, StepState};
use crate::failure::{Cause, StepError};
use crate::hook::ActionHook;
use crate::memory::RankMemory;
use crate::message::Tag;
use crate::progress::{Board, Doing, Waiting};
use crate::stage::Stage;
use crate::tensor::{Boundaries, CheckMetadata, Metadata};

/// What an executor takes from its pipeline.
pub(crate) struct ExecutorConfig {
    pub(crate) program: Arc<ValidatedProgram>,
    pub(crate) board: Board,
    pub(crate) metadata: Metadata,
    pub(crate) check_metadata: CheckMetadata,
    pub(crate) seed: u64,
    pub(crate) clip_norm: Option<f64>,
    pub(crate) hook: Option<Arc<dyn ActionHook>>,
    pub(crate) interrupt: Option<Arc<AtomicBool>>,
}

/// One rank's side of a step.
pub(crate) struct Executor {
    /// The rank in its pipeline, whose row of the program this is.
    pub(super) rank: Rank,
    /// The same among all ranks of the world, as reports and errors name it.
    pub(super) world_rank: Rank,
    pub(super) program: Arc<ValidatedProgram>,
    pub(super) stages: Vec<LocalStage>,
    pub(super) endpoint: MeshEndpoint,
    /// Of the random numbers that layers draw.
    pub(super) seed: u64,
    pub(super) clip_norm: Option<f64>,
    pub(super) memory: RankMemory,
    pub(super) board: Board,
    /// Raised when training is to end after the step.
    pub(super) interrupt: Option<Arc<AtomicBool>>,
    pub(super) hook: Option<Arc<dyn ActionHook>>,
    /// Microbatches whose gradients are in the sums, before this step.
    pub(super) accumulated: u32,
    /// Parameters with several owners; unknown before the ranks have told each other which they hold.
    pub(super) shared: Option<Arc<[Shared]>>,
    pub(super) step: StepState,
}

impl Executor {
    /// The executor of `endpoint`'s rank; `stages` are that rank's, in local order.
    pub(crate) fn new(
        config: ExecutorConfig,
        endpoint: MeshEndpoint,
        stages: Vec<(StageIndex, Stage)>,
        memory: RankMemory,
    ) -> Self {
        let microbatches = config.program.microbatches();
        let stages = stages.into_iter().map(|(stage, made)| {
            let boundaries = Boundaries::new(&config.metadata, config.check_metadata, stage, microbatches);
            LocalStage::new(stage, made, microbatches, boundaries)
        });
        Self {
            rank: endpoint.coord().rank,
            world_rank: endpoint.world_rank(),
            stages: stages.collect(),
            program: config.program,
            endpoint,
            seed: config.seed,
            clip_norm: config.clip_norm,
            memory,
            board: config.board,
            hook: config.hook,
            interrupt: config.interrupt,
            accumulated: 0,
            shared: None,
            step: StepState::idle(),
        }
    }

    /// Sets out on a step.
    pub(crate) fn begin(&mut self, input: StepInput) {
        self.endpoint.begin_step(input.attempt);
        self.memory.restart_peak();
        self.step = StepState { number: input.step, learning_rate: input.learning_rate, ..StepState::idle() };
        self.step.origin = input.origin;
        self.step.update_follows = input.update;
        self.program = input.program;
        self.step.side_inputs = input.side_inputs;
        self.step.loss_weights = input.loss_weights;
        self.step.keep_outputs = input.keep_outputs;
        self.step.phase = Phase::Actions;
        self.board.does(self.world_rank, Doing::Computes);
        self.stages.iter_mut().for_each(|local| local.gathers = 0);
        self.step.events.reserve(self.program.row(self.rank).len());
        self.board.moved(self.world_rank, 0);
        for (place, values) in input.inputs.into_iter().enumerate() {
            let local = self.stages.first_mut().expect("every rank owns a stage");
            local.inputs[place] = Some(values);
        }
        for (place, values) in input.targets.into_iter().enumerate() {
            let local = self.stages.last_mut().expect("every rank owns a stage");
            local.targets[place] = Some(values);
        }
    }

    /// Does the next thing there is to do, or says what it waits for.
    pub(crate) fn poll(&mut self) -> Result<Poll, StepError> {
        if self.endpoint.abort().is_raised() {
            let first = self.endpoint.abort().first().map_or(self.world_rank, |error| error.rank);
            return Err(self.error(Cause::Aborted { first }));
        }
        // Whoever waits is not polled, so what a report says of it holds as long as nothing arrives.
        if std::mem::take(&mut self.step.waits) {
            self.board.does(self.world_rank, Doing::Computes);
        }
        if !self.step.reductions.is_empty() {
            self.advance_reductions();
        }
        let waiting = match self.step.phase {
            Phase::Actions => self.poll_action(),
            Phase::Replicas => Ok(self.poll_replicas()),
            Phase::Parameters { next } => self.poll_parameters(next),
            Phase::Shared { next } => Ok(self.poll_shared(next)),
            Phase::SquaredNorms { next } => Ok(self.poll_squares(next)),
            Phase::Norm { next } => self.poll_norm(next),
            Phase::Ready { next } => Ok(self.poll_ready(next)),
            Phase::Update => self.poll_update(),
            Phase::Reports { next } => self.poll_reports(next),
            Phase::Summary => self.poll_summary(),
            Phase::Collect { next } => Ok(self.poll_collect(next)),
            Phase::Done => {
                self.board.does(self.world_rank, Doing::NoStep);
                return Ok(Poll::Done);
            }
        };
        match waiting {
            Ok(None) => Ok(Poll::Progress),
            Ok(Some(waiting)) => {
                self.step.waits = true;
                self.board.does(self.world_rank, Doing::Waits(waiting));
                Ok(Poll::Pending)
            }
            Err(cause) => Err(self.error(cause)),
        }
    }

    fn poll_action(&mut self) -> Result<Option<Waiting>, Cause> {
        let Some(&action) = self.program.row(self.rank).get(self.step.position) else {
            return self.end_of_program();
        };
        if self.step.entered.is_none() {
            self.step.entered = Some(Instant::now());
            if let Some(hook) = &self.hook {
                hook.before(self.world_rank, action);
            }
        }
        if let Some(waiting) = self.act_in_scope(action)? {
            return Ok(Some(waiting));
        }
        // What only announces is on the timeline from when its message was missed to when it was there.
        let announces = match action {
            Action::RecvForward { .. } | Action::RecvBackward { .. } => true,
            Action::Unshard { .. } => self.endpoint.part().is_some(),
            _ => false,
        };
        if !announces {
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

    /// Puts an action that has just ended on the timeline, from when it was first tried.
    fn note_event(&mut self, action: Action) {
        let origin = self.step.origin;
        let entered = self.step.entered.unwrap_or_else(Instant::now);
        self.step.events.push(Event {
            rank: self.world_rank,
            action,
            start: entered.saturating_duration_since(origin).as_secs_f64(),
            end: origin.elapsed().as_secs_f64(),
        });
    }

    /// Notes that the message of a receive is here. What the rank does with it begins now.
    pub(super) fn note_received(&mut self, action: Action) {
        self.note_event(action);
        self.step.entered = Some(Instant::now());
    }

    /// Sets out to collect the whole parameters of all stages, which takes all replicas where they are sharded.
    pub(crate) fn begin_collect(&mut self, attempt: u64) {
        self.endpoint.begin_step(attempt);
        self.step = StepState { number: self.step.number, ..StepState::idle() };
        self.stages.iter_mut().for_each(|local| local.gathers = 0);
        self.step.phase = Phase::Collect { next: 0 };
        self.board.does(self.world_rank, Doing::Computes);
    }

    /// What was collected. Call once, when it is done.
    pub(crate) fn collected(&mut self) -> Vec<NamedParameter> {
        std::mem::take(&mut self.step.collected)
    }

    /// Whether the rank has begun to update its parameters in this step.
    pub(crate) fn has_updated(&self) -> bool {
        self.step.has_updated
    }

    /// What the step amounted to: this rank's report first, and across processes every other rank's. Call once, when it
    /// is done.
    pub(crate) fn reports(&mut self) -> Vec<RankReport> {
        std::mem::take(&mut self.step.reports)
    }

    /// Forgets a step that failed: the next one starts as if it had not been.
    pub(crate) fn reset(&mut self) {
        self.stages.iter_mut().for_each(LocalStage::reset);
        self.accumulated = 0;
        self.step = StepState::idle();
        self.board.does(self.world_rank, Doing::NoStep);
    }

    /// An error of this rank at its place in the step.
    pub(crate) fn error(&self, cause: Cause) -> StepError {
        let action = match self.step.phase {
            Phase::Actions => self.program.row(self.rank).get(self.step.position).copied(),
            _ => None,
        };
        let cause = match cause {
            Cause::Panic { message } if self.step.phase == Phase::Update => Cause::Update { message },
            cause => cause,
        };
        StepError { rank: self.world_rank, step: self.step.number, action, cause }
    }

    pub(crate) fn endpoint(&mut self) -> &mut MeshEndpoint {
        &mut self.endpoint
    }

    pub(super) fn local_stage(&mut self, stage: StageIndex) -> &mut LocalStage {
        let place = self.program.placement().chunk_of(stage).index();
        &mut self.stages[place]
    }

    /// The rank waits for what a rank of its pipeline sends.
    pub(super) fn waiting(&self, from: Rank, tag: Tag) -> Waiting {
        Waiting { from: self.endpoint.world_rank_of(from), tag }
    }

    /// The rank of `stage`, or none when it is this one.
    pub(super) fn elsewhere(&self, stage: StageIndex) -> Option<Rank> {
        Some(self.program.placement().rank_of(stage)).filter(|&rank| rank != self.rank)
    }

    pub(super) fn is_last(&self, stage: StageIndex) -> bool {
        stage == self.program.placement().last_stage()
    }
}
