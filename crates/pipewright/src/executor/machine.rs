//! The states of a rank's step, and the way from one to the next.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use pipewright_schedule::{Action, Event, Rank, StageIndex, ValidatedProgram};

use super::chunk::Chunk;
use super::link::Link;
use super::reduction::Reduction;
use super::report::RankReport;
use super::sharing::{Shared, find_shared};
use crate::assembly::Assembly;
use crate::batch::Sides;
use crate::failure::{Cause, StepError};
use crate::hook::ActionHook;
use crate::memory::{RankMemory, bytes_of};
use crate::metadata::Boundaries;
use crate::progress::Board;
use crate::stage::{Gradient, Stage};
use crate::transport::{Contribution, OwnedParameter, Tag};
use crate::value::Values;

/// One rank's side of a step.
pub(crate) struct Executor {
    /// The rank in its pipeline, whose row of the program this is.
    pub(super) rank: Rank,
    /// The same among all ranks of the world, as reports and errors name it.
    pub(super) world_rank: Rank,
    pub(super) program: Arc<ValidatedProgram>,
    pub(super) chunks: Vec<Chunk>,
    pub(super) endpoint: Link,
    pub(super) clip_norm: Option<f64>,
    pub(super) memory: RankMemory,
    pub(super) board: Board,
    /// Raised when training is to end after the step.
    pub(super) interrupt: Option<Arc<AtomicBool>>,
    pub(super) hook: Option<Arc<dyn ActionHook>>,
    /// Microbatches whose gradients are in the sums, before this step.
    pub(super) accumulated: u32,
    /// Parameters with several owners; unknown before the first update, and after a step that failed.
    pub(super) shared: Option<Arc<[Shared]>>,
    pub(super) step: StepState,
}

/// What a rank needs to begin a step.
pub(crate) struct StepInput {
    /// Counted from 1.
    pub step: u64,
    /// Counts what the pipeline was asked to run: never goes back, where a checkpoint may take the step back.
    pub attempt: u64,
    /// The first stage's input of each microbatch; empty on other ranks.
    pub inputs: Vec<Values>,
    /// The last stage's targets of each microbatch; empty on other ranks.
    pub targets: Vec<Values>,
    /// What every stage may read, the same on all ranks.
    pub sides: Arc<Sides>,
    /// What each microbatch counts for, times their number.
    pub shares: Arc<[f64]>,
    /// Whether the report has the last stage's outputs.
    pub keep_outputs: bool,
    /// The optimizer's learning rate.
    pub learning_rate: f64,
    /// Whether the step ends with an update; if not, its gradients stay and those of the next step are added.
    pub update: bool,
    /// What to run: the program of the pipeline, or the forward part of it.
    pub program: Arc<ValidatedProgram>,
    /// The zero of the timeline.
    pub origin: Instant,
}

/// How far a poll got.
#[derive(Debug, PartialEq)]
pub(crate) enum Poll {
    /// Something was done: poll again.
    Progress,
    /// Nothing can be done before this has arrived.
    Blocked(Blocked),
    /// The step is done.
    Done,
}

/// What a rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocked {
    pub from: Rank,
    pub tag: Tag,
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from rank {}", self.tag, self.from)
    }
}

/// Where the step stands.
pub(super) struct StepState {
    pub(super) number: u64,
    pub(super) learning_rate: f64,
    pub(super) update_follows: bool,
    phase: Phase,
    position: usize,
    /// When the current action was first tried; a blocked one is tried again.
    pub(super) entered: Option<Instant>,
    origin: Instant,
    pub(super) events: Vec<Event>,
    pub(super) exposed: Duration,
    pub(super) sides: Arc<Sides>,
    pub(super) shares: Arc<[f64]>,
    pub(super) keep_outputs: bool,
    pub(super) losses: Vec<f64>,
    pub(super) auxiliary: BTreeMap<Arc<str>, f64>,
    /// What each rank holds, while that is being found out.
    pub(super) owned: Vec<(Rank, Vec<OwnedParameter>)>,
    /// The gradients of a shared parameter that are here, by owner.
    pub(super) shared_gradients: Vec<Gradient>,
    /// Gradients on their way between replicas.
    pub(super) reductions: Vec<Reduction>,
    pub(super) norm_parts: Contribution,
    pub(super) norm: Option<f64>,
    pub(super) update: Duration,
    /// Whether the update has begun: what comes after it cannot be taken back.
    has_updated: bool,
    /// Reports of the step that is done; this rank's is the first.
    pub(super) reports: Vec<RankReport>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Actions,
    /// The gradients of all replicas are added up.
    Replicas,
    /// The parameters of ranks below this one are known.
    Parameters {
        next: Rank,
    },
    /// Shared parameters below this one have the sum of their gradients.
    Shared {
        next: u32,
    },
    /// The parts of ranks below this one have been taken.
    Norm {
        next: Rank,
    },
    /// Replicas below this one are ready to update too.
    Ready {
        next: u32,
    },
    Update,
    /// The first rank has the reports of ranks below this one; only across processes.
    Reports {
        next: Rank,
    },
    /// The others wait for what it makes of them.
    Summary,
    Done,
}

impl Executor {
    /// The executor of `endpoint`'s rank; `stages` are that rank's, in chunk order.
    pub(crate) fn new(
        assembly: &Assembly,
        endpoint: Link,
        stages: Vec<(StageIndex, Stage)>,
        memory: RankMemory,
    ) -> Self {
        let microbatches = assembly.program.microbatches();
        let chunks = stages.into_iter().map(|(stage, mut made)| {
            if let Some(optimizer) = &assembly.config.optimizer {
                made.runner.set_optimizer(optimizer.clone());
            }
            let config = &assembly.config;
            let boundaries = Boundaries::new(&config.metadata, config.check_metadata, stage, microbatches);
            Chunk::new(stage, made, microbatches, boundaries)
        });
        Self {
            rank: endpoint.seat().rank,
            world_rank: endpoint.world_rank(),
            chunks: chunks.collect(),
            program: assembly.program.clone(),
            endpoint,
            clip_norm: assembly.config.clip_norm,
            memory,
            board: assembly.board.clone(),
            hook: assembly.config.hook.clone(),
            interrupt: assembly.config.interrupt.clone(),
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
        self.step.sides = input.sides;
        self.step.shares = input.shares;
        self.step.keep_outputs = input.keep_outputs;
        self.step.phase = Phase::Actions;
        self.step.events.reserve(self.program.row(self.rank).len());
        self.board.moved(self.world_rank, 0);
        let arrived = bytes_of(input.inputs.iter().chain(&input.targets).flatten());
        self.memory.take_over(arrived);
        for (place, values) in input.inputs.into_iter().enumerate() {
            let chunk = self.chunks.first_mut().expect("every rank owns a stage");
            chunk.inputs[place] = Some(values);
        }
        for (place, values) in input.targets.into_iter().enumerate() {
            let chunk = self.chunks.last_mut().expect("every rank owns a stage");
            chunk.targets[place] = Some(values);
        }
    }

    /// Does the next thing there is to do, or says what it waits for.
    pub(crate) fn poll(&mut self) -> Result<Poll, StepError> {
        if self.endpoint.abort().is_raised() {
            let first = self.endpoint.abort().first().map_or(self.world_rank, |error| error.rank);
            return Err(self.error(Cause::Aborted { first }));
        }
        if !self.step.reductions.is_empty() {
            self.advance_reductions();
        }
        let blocked = match self.step.phase {
            Phase::Actions => self.poll_action(),
            Phase::Replicas => Ok(self.poll_replicas()),
            Phase::Parameters { next } => self.poll_parameters(next),
            Phase::Shared { next } => Ok(self.poll_shared(next)),
            Phase::Norm { next } => self.poll_norm(next),
            Phase::Ready { next } => Ok(self.poll_ready(next)),
            Phase::Update => self.poll_update(),
            Phase::Reports { next } => self.poll_reports(next),
            Phase::Summary => self.poll_summary(),
            Phase::Done => return Ok(Poll::Done),
        };
        match blocked {
            Ok(None) => Ok(Poll::Progress),
            Ok(Some(blocked)) => {
                self.board.waits(self.world_rank);
                Ok(Poll::Blocked(blocked))
            }
            Err(cause) => Err(self.error(cause)),
        }
    }

    fn poll_action(&mut self) -> Result<Option<Blocked>, Cause> {
        let Some(&action) = self.program.row(self.rank).get(self.step.position) else {
            return self.end_of_program();
        };
        if self.step.entered.is_none() {
            self.step.entered = Some(Instant::now());
            if let Some(hook) = &self.hook {
                hook.before(self.world_rank, action);
            }
        }
        if let Some(blocked) = self.act_in_scope(action)? {
            return Ok(Some(blocked));
        }
        // A receive is on the timeline from when its message was missed to when it was there.
        if !matches!(action, Action::RecvForward { .. } | Action::RecvBackward { .. }) {
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

    fn end_of_program(&mut self) -> Result<Option<Blocked>, Cause> {
        self.read_losses()?;
        self.read_auxiliary()?;
        if self.program.is_forward_only() {
            self.finish();
        } else if !self.step.update_follows {
            self.accumulated += self.program.microbatches();
            self.finish();
        } else if self.reduces() {
            // The program may have started some of them.
            let stages: Vec<StageIndex> = self.chunks.iter().map(|chunk| chunk.stage).collect();
            stages.into_iter().try_for_each(|stage| self.start_reduction(stage))?;
            self.step.phase = Phase::Replicas;
        } else {
            self.find_or_sum_shared();
        }
        Ok(None)
    }

    fn poll_replicas(&mut self) -> Option<Blocked> {
        let blocked = self.awaited_reductions();
        if blocked.is_none() {
            self.board.moved(self.world_rank, self.step.position);
            self.step.reductions.clear();
            self.find_or_sum_shared();
        }
        blocked
    }

    fn find_or_sum_shared(&mut self) {
        if self.shared.is_none() {
            self.send_parameters();
            self.step.phase = Phase::Parameters { next: Rank::new(0) };
        } else {
            self.send_shared();
            self.step.phase = Phase::Shared { next: 0 };
        }
    }

    fn poll_parameters(&mut self, next: Rank) -> Result<Option<Blocked>, Cause> {
        if next.get() == self.endpoint.ranks() {
            self.shared = Some(find_shared(&self.step.owned)?.into());
            self.find_or_sum_shared();
            return Ok(None);
        }
        if next != self.rank && !self.take_parameters(next) {
            return Ok(Some(Blocked { from: next, tag: Tag::Parameters }));
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Parameters { next: Rank::new(next.get() + 1) };
        Ok(None)
    }

    fn poll_shared(&mut self, next: u32) -> Option<Blocked> {
        if self.shared.as_ref().is_none_or(|shared| next as usize == shared.len()) {
            self.send_norm_part();
            self.step.phase = Phase::Norm { next: Rank::new(0) };
            return None;
        }
        if let Some(blocked) = self.sum_shared(next) {
            return Some(blocked);
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Shared { next: next + 1 };
        None
    }

    fn poll_norm(&mut self, next: Rank) -> Result<Option<Blocked>, Cause> {
        if next.get() == self.endpoint.ranks() {
            self.step.norm = Some(self.gradient_norm()?);
            self.tell_ready();
            self.step.phase = Phase::Ready { next: 0 };
            return Ok(None);
        }
        if next != self.rank && !self.take_norm_part(next) {
            return Ok(Some(Blocked { from: next, tag: Tag::GradientNorm }));
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Norm { next: Rank::new(next.get() + 1) };
        Ok(None)
    }

    fn poll_ready(&mut self, next: u32) -> Option<Blocked> {
        if next == self.endpoint.replicas() {
            self.step.phase = Phase::Update;
            return None;
        }
        if next != self.endpoint.seat().replica && self.endpoint.try_take_across(next, Tag::Ready).is_none() {
            return Some(Blocked { from: self.endpoint.in_replica(next), tag: Tag::Ready });
        }
        self.step.phase = Phase::Ready { next: next + 1 };
        None
    }

    fn poll_update(&mut self) -> Result<Option<Blocked>, Cause> {
        let start = Instant::now();
        self.step.has_updated = true;
        self.update();
        self.step.update = start.elapsed();
        self.board.moved(self.world_rank, self.step.position);
        self.finish();
        Ok(None)
    }

    /// The rank has done its part. Across processes the step is done when all have.
    fn finish(&mut self) {
        self.make_report();
        self.step.phase = match self.endpoint.is_distributed() {
            false => Phase::Done,
            true if self.world_rank.get() == 0 => Phase::Reports { next: Rank::new(1) },
            true => Phase::Summary,
        };
    }

    fn poll_reports(&mut self, next: Rank) -> Result<Option<Blocked>, Cause> {
        if next.get() == self.endpoint.world_ranks() {
            self.send_summary();
            self.step.phase = Phase::Done;
            return Ok(None);
        }
        if !self.take_report(next)? {
            return Ok(Some(Blocked { from: next, tag: Tag::Report }));
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Reports { next: Rank::new(next.get() + 1) };
        Ok(None)
    }

    fn poll_summary(&mut self) -> Result<Option<Blocked>, Cause> {
        if !self.take_summary()? {
            return Ok(Some(Blocked { from: Rank::new(0), tag: Tag::Summary }));
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Done;
        Ok(None)
    }

    /// Whether the rank has begun to update its parameters in this step.
    pub(crate) fn has_updated(&self) -> bool {
        self.step.has_updated
    }

    /// Whether the step is done, and with it this rank's update.
    pub(crate) fn is_done(&self) -> bool {
        self.step.phase == Phase::Done
    }

    /// What the step amounted to: this rank's report first, and across processes every other rank's. Call once, when it
    /// is done.
    pub(crate) fn reports(&mut self) -> Vec<RankReport> {
        std::mem::take(&mut self.step.reports)
    }

    /// Forgets a step that failed: the next one starts as if it had not been.
    pub(crate) fn reset(&mut self) {
        self.chunks.iter_mut().for_each(Chunk::reset);
        // A step that failed in the middle of finding them out may have told some ranks and not others.
        self.shared = None;
        self.accumulated = 0;
        self.step = StepState::idle();
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

    pub(crate) fn endpoint(&mut self) -> &mut Link {
        &mut self.endpoint
    }

    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    pub(super) fn chunk(&mut self, stage: StageIndex) -> &mut Chunk {
        let place = self.program.placement().chunk_of(stage).index();
        &mut self.chunks[place]
    }

    /// The rank of `stage`, or none when it is this one.
    pub(super) fn elsewhere(&self, stage: StageIndex) -> Option<Rank> {
        Some(self.program.placement().rank_of(stage)).filter(|&rank| rank != self.rank)
    }

    pub(super) fn is_last(&self, stage: StageIndex) -> bool {
        stage == self.program.placement().last_stage()
    }
}

impl StepState {
    fn idle() -> Self {
        Self {
            number: 0,
            learning_rate: 0.0,
            update_follows: true,
            phase: Phase::Done,
            position: 0,
            entered: None,
            origin: Instant::now(),
            events: Vec::new(),
            exposed: Duration::ZERO,
            sides: Arc::default(),
            shares: Arc::default(),
            keep_outputs: false,
            losses: Vec::new(),
            auxiliary: BTreeMap::new(),
            owned: Vec::new(),
            shared_gradients: Vec::new(),
            reductions: Vec::new(),
            norm_parts: Vec::new(),
            norm: None,
            update: Duration::ZERO,
            has_updated: false,
            reports: Vec::new(),
        }
    }
}
