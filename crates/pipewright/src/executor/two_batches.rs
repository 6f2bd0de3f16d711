//! How the executor runs two batches at once, in the order of `overlap.rs`.

use std::mem::swap;
use std::sync::Arc;

use super::accumulation::Accumulation;
use super::checks::Checks;
use super::connection::ParkedAttempt;
use super::machine::Executor;
use super::overlap::{Lane, Next, Overlap, State, Turn, Turns};
use super::recorder::Recorder;
use super::reduction::Reductions;
use super::step::{Phase, Poll, Step};
use super::step_input::StepInput;
use crate::failure::{Cause, StepError};
use crate::ids::StepNumber;
use crate::progress::Activity;

/// The result of a poll.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OverlapPoll {
    /// An action or a message was processed: poll again.
    Progress,
    /// The rank waits for a message.
    Pending,
    /// The rank needs the next batch, or to know that none follows ([`Executor::give_next`]).
    Asks,
    /// The earlier batch has ended, and the executor shows it.
    Ended,
    /// No batch is left.
    Done,
}

impl Executor {
    /// Starts a step during which the next one may begin. [`Executor::poll_overlap`] continues both.
    pub(crate) fn begin_overlap(&mut self, input: StepInput, row: Arc<[bool]>) {
        let parked = Lane {
            step: Step::between(StepNumber::default(), Phase::Idle),
            recorder: Recorder::new(self.context.timeline_row()),
            reductions: Reductions::default(),
            checks: Checks::default(),
            accumulation: Accumulation::default(),
            attempt: ParkedAttempt::default(),
        };
        let attempts = [input.attempt; 2];
        let turns = Turns::new(row);
        self.overlap = Some(Overlap { turns, current: 0, attempts, computed: None, parked });
        self.begin(input);
    }

    /// Continues the batches of the rank.
    pub(crate) fn poll_overlap(&mut self) -> Result<OverlapPoll, StepError> {
        let mut waits = false;
        let overlap = self.own_overlap();
        if let Some((later, attempt)) = overlap.both().map(|[_, later]| (later, overlap.attempts[later]))
            && self.connection.is_stopped_in(attempt)
        {
            // The batch that has failed elsewhere is dropped at once. It would end every wait of the earlier one.
            self.go_to(later);
            self.poll()?;
        }
        if let Some(lane) = self.own_overlap().ending() {
            self.go_to(lane);
            match self.poll()? {
                Poll::Progress => return Ok(OverlapPoll::Progress),
                Poll::Pending => waits = true,
                Poll::Done => {
                    // The report has the peak since the end of the batch before.
                    self.connection.restart_peaks();
                    self.own_overlap().turns.states[lane] = State::Free;
                    return Ok(OverlapPoll::Ended);
                }
            }
        }
        match self.own_overlap().turns.turn() {
            Turn::Act(lane) => self.act_for(lane),
            Turn::Ask => Ok(OverlapPoll::Asks),
            Turn::Begin => {
                self.begin_given();
                Ok(OverlapPoll::Progress)
            }
            Turn::End if waits => Ok(OverlapPoll::Pending),
            Turn::End => {
                self.overlap = None;
                Ok(OverlapPoll::Done)
            }
        }
    }

    /// Waits until a message arrives or a batch fails on another rank.
    pub(crate) fn wait_overlap(&mut self) -> Result<(), StepError> {
        self.connection.wait().map_err(|cause| self.error_of_overlap(cause))
    }

    /// Makes an error of the batch that runs. A deadline that passes is an error of the earlier batch, for which the later
    /// one may wait too.
    pub(crate) fn error_of_overlap(&mut self, cause: Cause) -> StepError {
        let both = self.overlap.as_ref().and_then(Overlap::both);
        if let (Cause::Deadline { .. }, Some([earlier, _])) = (&cause, both) {
            self.go_to(earlier);
        }
        self.error(cause)
    }

    /// Returns whether all ranks of all processes have the next batch.
    pub(crate) fn has_next(&self) -> bool {
        self.overlap.as_ref().is_some_and(|overlap| self.granted > overlap.alive()[1])
    }

    /// Gives the rank the next batch, or says that none follows.
    pub(crate) fn give_next(&mut self, next: Option<Box<StepInput>>) {
        self.own_overlap().turns.next = next.map_or(Next::None, Next::Given);
    }

    /// Drops the batch that has failed if an earlier one continues. Returns whether that is so.
    pub(crate) fn drop_later(&mut self) -> bool {
        let Some(overlap) = &mut self.overlap else { return false };
        let (lane, other) = (overlap.current, 1 - overlap.current);
        let is_later =
            overlap.turns.states[other] != State::Free && overlap.attempts[lane] > overlap.attempts[other];
        if is_later {
            overlap.turns.drop_later(lane);
            // The messages of the other batch still follow.
            overlap.computed = overlap.computed.filter(|computed| *computed != lane);
            self.reductions.clear();
            self.stages.reset_batch();
            self.step = Step::between(StepNumber::default(), Phase::Idle);
            self.go_to(other);
        }
        is_later
    }

    /// Runs the next action of a batch.
    fn act_for(&mut self, lane: usize) -> Result<OverlapPoll, StepError> {
        self.go_to(lane);
        // The other batch may have waited, or ended.
        self.connection.set_activity(Activity::Computes);
        match self.poll() {
            Ok(Poll::Pending) => return Ok(OverlapPoll::Pending),
            Ok(Poll::Progress | Poll::Done) => {}
            // In the conversion of a boundary's tensors. The exchanges of modules panic.
            Err(StepError { cause: cause @ Cause::Deadline { .. }, .. }) => {
                return Err(self.error_of_overlap(cause));
            }
            Err(error) => return Err(error),
        }
        let (row, position) = (self.step.row(self.context.rank()), self.step.position);
        let computes = |index: usize| row.get(index).is_some_and(|action| action.is_compute());
        let (has_computed, next_computes) = (computes(position.wrapping_sub(1)), computes(position));
        let is_last = position >= row.len();
        let overlap = self.own_overlap();
        if has_computed {
            overlap.computed = Some(lane);
        }
        if overlap.computed.is_some() && (next_computes || is_last) {
            overlap.computed = None;
            overlap.turns.note_done(lane, is_last);
        }
        Ok(OverlapPoll::Progress)
    }

    /// Begins the next batch, which the rank has.
    fn begin_given(&mut self) {
        let overlap = self.own_overlap();
        let lane = 1 - overlap.turns.older;
        let Next::Given(input) = std::mem::replace(&mut overlap.turns.next, Next::Begun) else { return };
        self.go_to(lane);
        let overlap = self.own_overlap();
        overlap.turns.states[lane] = State::Acts;
        overlap.attempts[lane] = input.attempt;
        let alive = overlap.alive();
        self.connection.begin_next(input.attempt, alive);
        self.start(*input);
    }

    /// Lets the executor and its stages continue with a batch.
    fn go_to(&mut self, lane: usize) {
        let Self { step, recorder, reductions, checks, accumulation, connection, stages, overlap, .. } = self;
        let Some(overlap) = overlap.as_mut().filter(|overlap| overlap.current != lane) else { return };
        overlap.current = lane;
        let alive = overlap.alive();
        let parked = &mut overlap.parked;
        swap(step, &mut parked.step);
        swap(recorder, &mut parked.recorder);
        swap(reductions, &mut parked.reductions);
        swap(checks, &mut parked.checks);
        swap(accumulation, &mut parked.accumulation);
        connection.switch(&mut parked.attempt, alive);
        stages.switch();
    }

    fn own_overlap(&mut self) -> &mut Overlap {
        self.overlap.as_mut().expect("batches overlap only between `begin_overlap` and `Poll::Done`")
    }
}
