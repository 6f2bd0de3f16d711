//! The answers of the ranks: how the pipeline waits for them and for other processes, and which failure it
//! reports.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::ranks::{End, Ranks};
use super::step_plan::StepAttempt;
use crate::failure::{Cause, StepError};
use crate::ids::WorldRank;

/// How often the pipeline checks for progress within the time in which some rank must make progress.
const LOOKS: u32 = 8;

/// How often the pipeline checks for failures while it waits for another process.
const LOOK: Duration = Duration::from_millis(10);

/// The answers of all ranks to a command, in rank order; an error if a rank does not answer.
pub(super) type Answers<T> = Result<Vec<Result<T, StepError>>, StepError>;

impl Ranks {
    /// Waits for the answers of all ranks to the last command and returns their results in rank order. If any
    /// rank failed, returns the first cause. All ranks have answered then, and the abort flag is reset.
    pub(super) fn await_ranks<R, T>(
        &mut self,
        replies: &Receiver<(WorldRank, R)>,
        result: impl FnMut(R) -> Result<T, StepError>,
    ) -> Result<Vec<T>, StepError> {
        let answers = self.collect(self.at, replies, result);
        self.conclude(self.at, answers)
    }

    /// Waits for the answers of all ranks to the command with the numbers `at`. The error of a rank that does
    /// not answer may follow from an earlier one ([`Ranks::conclude`]).
    pub(super) fn collect<R, T>(
        &mut self,
        at: StepAttempt,
        replies: &Receiver<(WorldRank, R)>,
        mut result: impl FnMut(R) -> Result<T, StepError>,
    ) -> Answers<T> {
        let mut answers: Vec<Option<Result<T, StepError>>> = self.threads.iter().map(|_| None).collect();
        let (mut moves, mut since) = (self.board.moves(), Instant::now());
        while let Some(silent) = answers.iter().position(Option::is_none) {
            match replies.recv_timeout(self.patience / LOOKS) {
                Ok((rank, reply)) => {
                    let index = self.threads.iter().position(|thread| thread.rank == rank);
                    answers[index.expect("only ranks of this process answer")] = Some(result(reply));
                }
                Err(RecvTimeoutError::Timeout) if self.board.moves() != moves => {
                    (moves, since) = (self.board.moves(), Instant::now());
                }
                Err(RecvTimeoutError::Timeout) if since.elapsed() < self.patience => {}
                Err(RecvTimeoutError::Timeout) => return Err(self.give_up(at, self.threads[silent].rank)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.lose(at, self.threads[silent].rank)),
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Waits for a message of another process in the command with the numbers `at`, which the ranks of this
    /// process have ended. `look` waits for it for some time.
    pub(super) fn await_process<T>(
        &self,
        at: StepAttempt,
        mut look: impl FnMut(Duration) -> Option<T>,
    ) -> Result<T, StepError> {
        let (mut moves, mut since) = (self.board.moves(), Instant::now());
        loop {
            if let Some(message) = look(LOOK.min(self.patience)) {
                return Ok(message);
            }
            if self.abort.is_raised_in(at.attempt)
                && let Some(first) = self.abort.first_in(at.attempt)
            {
                return Err(first);
            }
            if self.board.moves() != moves {
                (moves, since) = (self.board.moves(), Instant::now());
            } else if since.elapsed() >= self.patience {
                let cause = Cause::Deadline { waited: self.deadline, report: self.board.report() };
                return Err(self.own_error(at, cause));
            }
        }
    }

    /// Returns whether a rank has failed in the command with the numbers `at`.
    pub(super) fn has_failed<T>(&self, at: StepAttempt, answers: &Answers<T>) -> bool {
        let is_failed = answers.as_ref().map_or(true, |answers| answers.iter().any(Result::is_err));
        is_failed || self.abort.is_raised_in(at.attempt)
    }

    /// Returns the results of all ranks, or the first cause if a rank has failed in the command with the
    /// numbers `at` or was lost. If all ranks have answered, the abort flag is reset. Ranks that were given a
    /// later command must have answered that one too.
    pub(super) fn conclude<T>(&mut self, at: StepAttempt, answers: Answers<T>) -> Result<Vec<T>, StepError> {
        let answers = match answers {
            Ok(answers) => answers,
            Err(lost) => return Err(self.abort.first_in(at.attempt).unwrap_or(lost)),
        };
        let first = self.abort.clear_in(at.attempt);
        let answers: Result<Vec<T>, StepError> = answers.into_iter().collect();
        // Another process may have failed after all ranks of this one had answered.
        let answers = match &first {
            Some(first) => answers.and(Err(first.clone())),
            None => answers,
        };
        answers.map_err(|error| {
            let first = first.unwrap_or(error);
            match first.cause {
                Cause::LostPeer { peer } | Cause::SilentPeer { peer, .. } => self.end = Some(End::Lost(peer)),
                // Its process takes part in no further step.
                Cause::Transport { .. } => self.end = Some(End::Lost(first.rank)),
                _ => {}
            }
            first
        })
    }

    /// Treats a rank as failed that has neither made progress nor answered before the deadline. The other
    /// ranks are stopped. The thread of this rank cannot be stopped and is left running.
    fn give_up(&mut self, at: StepAttempt, silent: WorldRank) -> StepError {
        let report = self.board.report();
        let cause = Cause::Deadline { waited: self.deadline, report };
        self.end_with(at, StepError { rank: silent, step: at.step, action: None, cause })
    }

    /// Treats a rank as failed whose thread has ended without an answer.
    fn lose(&mut self, at: StepAttempt, lost: WorldRank) -> StepError {
        self.end_with(at, Self::lost_in(at.step, lost))
    }

    /// Stops the other ranks in the command with the numbers `at`, because one was lost with this error.
    fn end_with(&mut self, at: StepAttempt, error: StepError) -> StepError {
        self.end = Some(End::Lost(error.rank));
        self.raise(at, &error);
        error
    }
}
