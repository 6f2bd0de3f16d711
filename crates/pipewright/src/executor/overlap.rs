//! Two batches of a rank at once, if parameters are delayed by one update.
//!
//! A rank repeats one row, in which the rest of an older batch is mixed with the first computations of the next one
//! ([`pipewright_schedule::delay`]). [`Turns`] says which of the two has the next computation. The messages behind a
//! computation in the rank's row of the program belong to it. When the older batch has run its row, its sums, its norm
//! and its update follow, one message at a time, while the next batch, which is then the older one, computes.
//!
//! | state of a batch on a rank | it begins | it ends |
//! |---|---|---|
//! | acts | with its first computation, once the batch two before it has updated on this rank | with its row |
//! | ends | when its row has ended, and the batch before it has updated | when it has updated |
//!
//! So there are at most two batches, each with a version of the parameters (`stage/training/versions.rs`): the executor
//! and its stages have the parts of one, and park those of the other ([`Lane`]). Messages belong to an attempt, which is
//! the batch.
//!
//! Whether a batch follows the one before without a drain is the same on all ranks ([`Follow`]): the pipeline says so
//! before it gives the batch to the first rank, unless a rank has come to the place in its row where the next batch
//! begins. That rank then decides for all that the pipeline drains, and the batch begins after the update.
//!
//! A failure of the later batch drops that batch, and the earlier one runs to its end alone: nothing of it waits for the
//! later one. A failure of the earlier batch drops both.

use std::mem::swap;
use std::sync::{Arc, OnceLock};

use super::accumulation::Accumulation;
use super::checks::Checks;
use super::connection::ParkedAttempt;
use super::machine::Executor;
use super::recorder::Recorder;
use super::reduction::Reductions;
use super::step::{Phase, Poll, Step};
use super::step_input::StepInput;
use crate::failure::StepError;
use crate::ids::{Attempt, StepNumber};
use crate::progress::Activity;

/// How a batch overlaps with the one after it, on one rank.
#[derive(Clone)]
pub(crate) struct OverlapRule {
    /// For each computation of the repeating row, whether it belongs to the next batch.
    pub(crate) row: Arc<[bool]>,
    pub(crate) follow: Follow,
}

/// Whether the next batch follows a batch without a drain, the same on all ranks of the process. Clones are one decision.
#[derive(Clone, Debug, Default)]
pub(crate) struct Follow(Arc<OnceLock<bool>>);

impl Follow {
    /// Decides that the next batch follows, unless a rank has decided that none does. Returns the decision.
    pub(crate) fn announce(&self) -> bool {
        *self.0.get_or_init(|| true)
    }

    /// Returns whether the next batch follows. If it is not announced, none does.
    pub(crate) fn decide(&self) -> bool {
        *self.0.get_or_init(|| false)
    }
}

/// The parts of a rank that belong to one batch.
pub(super) struct Lane {
    step: Step,
    recorder: Recorder,
    reductions: Reductions,
    checks: Checks,
    accumulation: Accumulation,
    attempt: ParkedAttempt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Acts,
    Ends,
}

/// The next batch of a rank's repeating row, with its input.
enum Next<I> {
    /// It is not known whether there is one.
    Unknown,
    None,
    /// The rank has it, and has not begun it.
    Given(I),
    Begun,
}

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

/// What a rank does next.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Act(usize),
    Ask,
    Begin,
    /// It only ends batches.
    End,
}

/// Whose turn it is in a rank's repeating row. The batches are numbered 0 and 1 by turns.
struct Turns<I> {
    row: Arc<[bool]>,
    /// The computations that are left before the first batch comes to the row.
    lead: usize,
    /// The place in the row.
    at: usize,
    older: usize,
    next: Next<I>,
    states: [State; 2],
}

impl<I> Turns<I> {
    fn new(row: Arc<[bool]>) -> Self {
        let lead = row.iter().filter(|is_next| **is_next).count();
        Self { row, lead, at: 0, older: 0, next: Next::Unknown, states: [State::Acts, State::Free] }
    }

    fn turn(&mut self) -> Turn {
        loop {
            let is_next = match self.row.get(self.at) {
                _ if self.lead > 0 => false,
                Some(is_next) => *is_next,
                // The older batch has run its row.
                None if matches!(self.next, Next::Begun) => {
                    (self.older, self.at, self.next) = (1 - self.older, 0, Next::Unknown);
                    continue;
                }
                None if matches!(self.next, Next::None) => return Turn::End,
                None => true,
            };
            return match self.next {
                _ if !is_next => Turn::Act(self.older),
                Next::Begun => Turn::Act(1 - self.older),
                Next::Unknown => Turn::Ask,
                Next::Given(_) if self.states[1 - self.older] == State::Free => Turn::Begin,
                Next::Given(_) => Turn::End,
                Next::None => {
                    self.at += 1;
                    continue;
                }
            };
        }
    }

    /// Notes that a computation of a batch is done, with the messages behind it. `is_last` says whether it is the last one
    /// of the batch.
    fn note_done(&mut self, lane: usize, is_last: bool) {
        match self.lead {
            0 => self.at += 1,
            _ => self.lead -= 1,
        }
        if is_last {
            self.states[lane] = State::Ends;
        }
    }

    /// Drops a batch that has failed while the one before it continues. No further one begins.
    fn drop_later(&mut self, lane: usize) {
        self.states[lane] = State::Free;
        self.next = Next::None;
        if lane == self.older {
            self.at = self.row.len();
        }
    }
}

/// The batches of a rank that run at once.
pub(super) struct Overlap {
    turns: Turns<Box<StepInput>>,
    /// The batch whose parts the executor has.
    current: usize,
    attempts: [Attempt; 2],
    /// Whether the computation has run whose messages follow.
    has_computed: bool,
    parked: Lane,
}

impl Overlap {
    /// Returns the first batch that ends.
    fn ending(&self) -> Option<usize> {
        let ends = |lane: &usize| self.turns.states[*lane] == State::Ends;
        (0..2).filter(ends).min_by_key(|lane| self.attempts[*lane])
    }

    /// Returns the first and the last attempt of the rank.
    fn alive(&self) -> [Attempt; 2] {
        let attempts =
            (0..2).filter(|lane| self.turns.states[*lane] != State::Free).map(|lane| self.attempts[lane]);
        let own = self.attempts[self.current];
        attempts.fold([own; 2], |[first, last], attempt| [first.min(attempt), last.max(attempt)])
    }
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
        self.overlap = Some(Overlap { turns, current: 0, attempts, has_computed: false, parked });
        self.begin(input);
    }

    /// Continues the batches of the rank.
    pub(crate) fn poll_overlap(&mut self) -> Result<OverlapPoll, StepError> {
        let mut waits = false;
        if let Some(lane) = self.own_overlap().ending() {
            self.go_to(lane);
            match self.poll()? {
                Poll::Progress => return Ok(OverlapPoll::Progress),
                Poll::Pending => waits = true,
                Poll::Done => {
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
            overlap.has_computed = false;
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
        if self.poll()? == Poll::Pending {
            return Ok(OverlapPoll::Pending);
        }
        let (row, position) = (self.step.row(self.context.rank()), self.step.position);
        let computes = |index: usize| row.get(index).is_some_and(|action| action.is_compute());
        let (has_computed, next_computes) = (computes(position.wrapping_sub(1)), computes(position));
        let is_last = position >= row.len();
        let overlap = self.own_overlap();
        overlap.has_computed |= has_computed;
        if overlap.has_computed && (next_computes || is_last) {
            overlap.has_computed = false;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs so many batches with a row of computations, and returns them: the batch of each, `|` where a batch has updated.
    /// `updates_at_once` says whether a batch updates as soon as it has run its row, and not only when nothing else can run.
    fn run(row: &[bool], batches: usize, updates_at_once: bool) -> String {
        let mut turns = Turns::new(row.into());
        let (mut numbers, mut given, mut left) = ([0, 0], 1, [row.len(); 2]);
        let mut text = String::new();
        loop {
            let ending =
                (0..2).filter(|lane| turns.states[*lane] == State::Ends).min_by_key(|lane| numbers[*lane]);
            let end = |turns: &mut Turns<()>, text: &mut String| match ending {
                Some(lane) => {
                    turns.states[lane] = State::Free;
                    text.push('|');
                    true
                }
                None => false,
            };
            if updates_at_once && end(&mut turns, &mut text) {
                continue;
            }
            match turns.turn() {
                Turn::Act(lane) => {
                    left[lane] -= 1;
                    text.push_str(&numbers[lane].to_string());
                    turns.note_done(lane, left[lane] == 0);
                }
                Turn::Ask if given < batches => turns.next = Next::Given(()),
                Turn::Ask => turns.next = Next::None,
                Turn::Begin => {
                    let lane = 1 - turns.older;
                    (numbers[lane], left[lane], given) = (given, row.len(), given + 1);
                    (turns.states[lane], turns.next) = (State::Acts, Next::Begun);
                }
                Turn::End if end(&mut turns, &mut text) => {}
                Turn::End => return text,
            }
        }
    }

    /// Every batch runs its computations, and none begins before the batch two before it has updated.
    #[test]
    fn batches_take_turns() {
        let row = [false, false, true, false];
        assert_eq!(run(&row, 1, true), "0000|");
        assert_eq!(run(&row, 3, true), "00010|1121|222|");
        // The third batch waits for the update with the first one.
        assert_eq!(run(&row, 3, false), "0001011|21222||");
    }
}
