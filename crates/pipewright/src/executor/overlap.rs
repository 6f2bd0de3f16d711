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
//! and its stages have the parts of one, and park the parts of the other ([`Lane`]). Messages belong to an attempt, which is
//! the batch.
//!
//! Whether a batch follows the one before without a drain is the same on all ranks. Between processes, the gradient norm of the
//! batch two before says that all have it. Within one process ([`Follow`](super::step_input::Follow)), the pipeline says so
//! before it gives the batch to the first rank, unless a rank could begin it and has come to the place in its row where it
//! begins. That rank then decides for all that the pipeline drains, and the batch begins after the update.
//!
//! A failure of the later batch drops that batch, and the earlier one runs to its end alone: nothing of it waits for the
//! later one. A failure of the earlier batch drops both.

use std::sync::Arc;

use super::accumulation::Accumulation;
use super::checks::Checks;
use super::connection::ParkedAttempt;
use super::recorder::Recorder;
use super::reduction::Reductions;
use super::step::Step;
use super::step_input::StepInput;
use crate::ids::Attempt;

/// The parts of a rank that belong to one batch.
pub(super) struct Lane {
    pub(super) step: Step,
    pub(super) recorder: Recorder,
    pub(super) reductions: Reductions,
    pub(super) checks: Checks,
    pub(super) accumulation: Accumulation,
    pub(super) attempt: ParkedAttempt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Acts,
    Ends,
}

/// The next batch of a rank's repeating row, with its input.
pub(super) enum Next<I> {
    /// It is not known whether there is one.
    Unknown,
    None,
    /// The rank has it, and has not begun it.
    Given(I),
    Begun,
}

/// The next thing that a rank does.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Act(usize),
    Ask,
    Begin,
    /// It only ends batches.
    End,
}

/// Whose turn it is in a rank's repeating row. The batches are numbered 0 and 1 by turns.
pub(super) struct Turns<I> {
    row: Arc<[bool]>,
    /// The computations that are left before the first batch comes to the row.
    lead: usize,
    /// The place in the row.
    at: usize,
    pub(super) older: usize,
    pub(super) next: Next<I>,
    pub(super) states: [State; 2],
}

impl<I> Turns<I> {
    pub(super) fn new(row: Arc<[bool]>) -> Self {
        let lead = row.iter().filter(|is_next| **is_next).count();
        Self { row, lead, at: 0, older: 0, next: Next::Unknown, states: [State::Acts, State::Free] }
    }

    pub(super) fn turn(&mut self) -> Turn {
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
                Next::Unknown if self.states[1 - self.older] == State::Free => Turn::Ask,
                // The batch before the older one has not updated.
                Next::Unknown => Turn::End,
                Next::Given(_) => Turn::Begin,
                Next::None => {
                    self.at += 1;
                    continue;
                }
            };
        }
    }

    /// Notes that a computation of a batch is done, with the messages behind it. `is_last` says whether it is the last one
    /// of the batch.
    pub(super) fn note_done(&mut self, lane: usize, is_last: bool) {
        match self.lead {
            0 => self.at += 1,
            _ => self.lead -= 1,
        }
        if is_last {
            self.states[lane] = State::Ends;
        }
    }

    /// Drops a batch that has failed while the one before it continues. No further one begins.
    pub(super) fn drop_later(&mut self, lane: usize) {
        self.states[lane] = State::Free;
        self.next = Next::None;
        if lane == self.older {
            self.at = self.row.len();
        }
    }
}

/// The batches of a rank that run at once.
pub(super) struct Overlap {
    pub(super) turns: Turns<Box<StepInput>>,
    /// The batch whose parts the executor has.
    pub(super) current: usize,
    pub(super) attempts: [Attempt; 2],
    /// The batch whose last computation has run, and whose messages behind it have not.
    pub(super) computed: Option<usize>,
    pub(super) parked: Lane,
}

impl Overlap {
    /// Returns the first batch that ends.
    pub(super) fn ending(&self) -> Option<usize> {
        let ends = |lane: &usize| self.turns.states[*lane] == State::Ends;
        (0..2).filter(ends).min_by_key(|lane| self.attempts[*lane])
    }

    /// Returns the earlier and the later batch, if two run.
    pub(super) fn both(&self) -> Option<[usize; 2]> {
        let run = self.turns.states.iter().all(|state| *state != State::Free);
        run.then(|| if self.attempts[0] < self.attempts[1] { [0, 1] } else { [1, 0] })
    }

    /// Returns the first and the last attempt of the rank.
    pub(super) fn alive(&self) -> [Attempt; 2] {
        let attempts =
            (0..2).filter(|lane| self.turns.states[*lane] != State::Free).map(|lane| self.attempts[lane]);
        let own = self.attempts[self.current];
        attempts.fold([own; 2], |[first, last], attempt| [first.min(attempt), last.max(attempt)])
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
                Turn::Ask => {
                    assert_eq!(turns.states[1 - turns.older], State::Free, "it could begin the batch");
                    turns.next = if given < batches { Next::Given(()) } else { Next::None };
                }
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
        // The third batch waits for the update with the first one, and the question for a fourth one for the next update.
        assert_eq!(run(&row, 3, false), "0001011|2122|2|");
        // A row that begins with the next batch.
        let row = [true, true, false, false];
        assert_eq!(run(&row, 3, true), "001100|2211|22|");
        assert_eq!(run(&row, 3, false), "001100|2211|22|");
    }
}
