//! How a pipeline speaks with its ranks: commands to all, one answer of each, and what a failure leaves behind.

use crossbeam_channel::RecvTimeoutError;
use pipewright_schedule::Rank;

use super::error::PipelineError;
use super::running::Pipeline;
use crate::driver::{Command, Reply};
use crate::failure::{Cause, StepError};

/// What ends a pipeline for good.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// A rank no longer answers.
    Lost(Rank),
    /// The step left some ranks' parameters updated and others' not.
    Diverged(u64),
    /// A restore failed half-way.
    HalfRestored,
}

impl Pipeline {
    pub(super) fn command(&mut self, mut command: impl FnMut() -> Command) -> Result<(), PipelineError> {
        match self.end {
            Some(End::Lost(peer)) => return Err(self.lost_peer(peer).into()),
            Some(End::Diverged(step)) => return Err(PipelineError::Diverged { step }),
            Some(End::HalfRestored) => return Err(PipelineError::HalfRestored),
            None => {}
        }
        for thread in &self.ranks {
            if thread.commands.send(command()).is_err() {
                return Err(self.lost_peer(thread.rank).into());
            }
        }
        Ok(())
    }

    pub(super) fn lost_peer(&self, peer: Rank) -> StepError {
        StepError { rank: peer, step: self.step, action: None, cause: Cause::LostPeer { peer } }
    }

    /// One reply of every rank, in rank order; or, when any failed, the first cause. All ranks have answered then, and
    /// the abort flag is lowered.
    pub(super) fn await_ranks<T>(
        &mut self,
        mut take: impl FnMut(Reply) -> Result<T, StepError>,
    ) -> Result<Vec<T>, StepError> {
        let mut answers: Vec<Option<Result<T, StepError>>> = self.ranks.iter().map(|_| None).collect();
        let mut moves = self.assembly.board.moves();
        while let Some(silent) = answers.iter().position(Option::is_none) {
            match self.replies.recv_timeout(self.assembly.config.deadline) {
                Ok((rank, reply)) => {
                    let place = self.ranks.iter().position(|thread| thread.rank == rank);
                    answers[place.expect("only ranks of this process answer")] = Some(take(reply));
                }
                Err(RecvTimeoutError::Timeout) if self.assembly.board.moves() != moves => {
                    moves = self.assembly.board.moves();
                }
                Err(_) => return Err(self.give_up(self.ranks[silent].rank)),
            }
        }
        let first = self.assembly.abort.first();
        self.assembly.abort.clear();
        let answers: Result<Vec<T>, StepError> = answers.into_iter().flatten().collect();
        // Another process may have failed when all ranks of this one had answered.
        let answers = match &first {
            Some(first) => answers.and(Err(first.clone())),
            None => answers,
        };
        answers.map_err(|error| {
            let first = first.unwrap_or(error);
            if let Cause::LostPeer { peer } | Cause::SilentPeer { peer, .. } = first.cause {
                self.end = Some(End::Lost(peer));
            }
            first
        })
    }

    /// A rank has neither moved nor answered for the deadline: its stage does not come back. The others are told to
    /// stop; the thread cannot be, and is left behind.
    fn give_up(&mut self, silent: Rank) -> StepError {
        self.end = Some(End::Lost(silent));
        let report = self.assembly.board.report();
        let cause = Cause::Deadline { waited: self.assembly.config.deadline, report };
        self.assembly.abort.raise(StepError { rank: silent, step: self.step, action: None, cause });
        self.assembly.abort.first().unwrap_or_else(|| self.lost_peer(silent))
    }

    /// Leaves the ranks fit for the next step, where that can be had.
    pub(super) fn failed_step(&mut self, error: StepError, any_updated: bool) -> StepError {
        // A step that fails drops all gradients.
        self.pending = false;
        if any_updated || error.in_update() {
            self.end.get_or_insert(End::Diverged(self.step));
        } else {
            // Ranks that finished may hold gradients of this step, the others lost those of the steps before it.
            for thread in &self.ranks {
                let _ = thread.commands.send(Command::Reset);
            }
        }
        error
    }
}
