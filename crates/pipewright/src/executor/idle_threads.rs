//! The threads of the ranks of this process, for a rank that works while all others wait.
//!
//! A step often ends with one rank: the others have ended their rows of the program and wait for the gradient
//! norm, or have updated and wait for the first forward of the next step. Its sums of squares and its update
//! then use the threads of all ranks. They are bound by the bandwidth of memory, of which the threads of one
//! rank take a part. The results do not depend on the number of threads.

use std::sync::Arc;

use pipewright_kernel::threads::{LentThreads, with_threads};

use crate::ids::WorldRank;
use crate::progress::ProgressBoard;

/// The threads of the ranks of a process. Clones share them.
#[derive(Clone)]
pub(crate) struct IdleThreads {
    board: ProgressBoard,
    /// The threads that a rank uses besides its own one while all others wait; none if it has as many itself.
    others: Arc<LentThreads>,
}

impl IdleThreads {
    /// Describes the threads of `ranks` ranks, all in this process, and counts at most one for each processor.
    pub(crate) fn new(board: ProgressBoard, ranks: usize, threads_per_rank: usize) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (ranks * threads_per_rank).min(processors);
        let others = if threads > threads_per_rank { threads - 1 } else { 0 };
        Self { board, others: Arc::new(LentThreads::new(others)) }
    }

    /// Calls `work`, whose loops over long slices use the threads of all ranks if the other ranks wait.
    pub(super) fn lend<R>(&self, rank: WorldRank, work: impl FnOnce() -> R) -> R {
        match self.of_others(rank) {
            Some(threads) => with_threads(threads, work),
            None => work(),
        }
    }

    fn of_others(&self, rank: WorldRank) -> Option<&Arc<LentThreads>> {
        (self.others.count() > 0 && self.board.others_wait(rank)).then_some(&self.others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{AwaitedMessage, Tag};
    use crate::progress::Activity;

    /// Returns the threads that rank 0 of two ranks with a thread each has besides its own one; rank 1 does
    /// `activity`.
    fn check(activity: Activity) -> usize {
        let board = ProgressBoard::new(2);
        board.set_activity(WorldRank::new(0), Activity::Computes);
        board.set_activity(WorldRank::new(1), activity);
        let threads = IdleThreads::new(board, 2, 1);
        threads.of_others(WorldRank::new(0)).map_or(0, |threads| threads.count())
    }

    #[test]
    fn a_rank_has_the_threads_of_ranks_that_wait() {
        let awaited = AwaitedMessage { from: WorldRank::new(0), tag: Tag::GlobalNorm };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(check(Activity::Waits(awaited)), processors.min(2) - 1);
        assert_eq!(check(Activity::NoStep), processors.min(2) - 1);
        assert_eq!(check(Activity::Computes), 0, "that rank needs its thread");
    }

    #[test]
    fn the_only_rank_of_a_process_has_its_own_threads() {
        let board = ProgressBoard::new(1);
        assert!(IdleThreads::new(board, 1, 2).of_others(WorldRank::new(0)).is_none());
    }
}
