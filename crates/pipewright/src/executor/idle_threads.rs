//! The threads of the ranks of this process, for a rank that works while all others wait.
//!
//! A step often ends with one rank: the others have ended their rows of the program and wait for the gradient
//! norm, or have updated and wait for the first forward of the next step. Its sums of squares and its update
//! then use the threads of all ranks. They are bound by the bandwidth of memory, of which the threads of one
//! rank take a part. The results do not depend on the number of threads.

use std::sync::Arc;

use pipewright_kernel::threads::{LentThreads, with_threads};

use crate::device::RankThreads;
use crate::ids::WorldRank;
use crate::progress::ProgressBoard;

/// The threads of the ranks of a process. Clones share them.
#[derive(Clone)]
pub(crate) struct IdleThreads {
    board: ProgressBoard,
    of_ranks: RankThreads,
    /// The threads that a rank uses besides its own one while all others wait.
    others: Arc<LentThreads>,
}

impl IdleThreads {
    /// Describes the threads of the ranks of this process, and counts at most one for each processor.
    pub(crate) fn new(
        board: ProgressBoard,
        of_ranks: RankThreads,
        ranks: impl IntoIterator<Item = WorldRank>,
    ) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = of_ranks.sum(ranks).min(processors);
        Self { board, of_ranks, others: Arc::new(LentThreads::new(threads.saturating_sub(1))) }
    }

    /// Calls `work`, whose loops over long slices use the threads of all ranks if the other ranks wait.
    pub(super) fn lend<R>(&self, rank: WorldRank, work: impl FnOnce() -> R) -> R {
        match self.of_others(rank) {
            Some(threads) => with_threads(threads, work),
            None => work(),
        }
    }

    fn of_others(&self, rank: WorldRank) -> Option<&Arc<LentThreads>> {
        // A rank that has as many threads itself keeps them.
        let has_fewer = self.of_ranks.of(rank) <= self.others.count();
        (has_fewer && self.board.others_wait(rank)).then_some(&self.others)
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
        let threads = IdleThreads::new(board, 1.into(), [0, 1].map(WorldRank::new));
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
        let rank = WorldRank::new(0);
        assert!(IdleThreads::new(board, 2.into(), [rank]).of_others(rank).is_none());
    }

    #[test]
    fn a_rank_that_has_a_thread_for_each_processor_keeps_its_own() {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let ranks = [0, 1].map(WorldRank::new);
        let threads = IdleThreads::new(ProgressBoard::new(2), vec![processors, 1].into(), ranks);
        ranks.into_iter().for_each(|rank| threads.board.set_activity(rank, Activity::NoStep));
        let of_others = ranks.map(|rank| threads.of_others(rank).map_or(0, |threads| threads.count()));
        // The other rank gets the threads of the first one, if there are several processors.
        assert_eq!(of_others, [0, processors - 1]);
    }
}
