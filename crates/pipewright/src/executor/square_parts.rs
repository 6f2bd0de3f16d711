//! The parts of a parameter's rows whose squares are added to the gradient norm, and the ranks that send
//! them.

use serde::{Deserialize, Serialize};

use super::context::RankContext;

/// The squares of a parameter that the first replica with the same experts sends to the other ranks: runs of
/// neighbouring parts, each of `length` parts. Replica `i` of an expert group of `n` has the runs `i`,
/// `i + n` and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Squares {
    pub(super) runs: usize,
    pub(super) length: usize,
}

impl Squares {
    /// One sum for all parts.
    pub(super) const SUM: Self = Self { runs: 1, length: 1 };

    /// Returns the squares of an expert that only some replicas hold, or of another parameter.
    pub(super) fn of(context: &RankContext, is_expert: bool) -> Self {
        if is_expert || context.row_holders() == 1 {
            return Self::SUM;
        }
        Self { runs: context.expert_holders(), length: context.copy_group.members().len() }
    }

    /// Returns the number of sums.
    pub(super) fn count(self) -> usize {
        self.runs * self.length
    }
}

/// The sums of squares of a parameter that replicas with the same experts gather.
#[derive(Clone, Copy)]
pub(super) struct Gathered {
    /// The number of parts of each replica.
    pub(super) parts: usize,
    /// Whether they are all parts of the parameter, so that they are added.
    pub(super) are_all: bool,
}

impl Gathered {
    pub(super) fn of(context: &RankContext, is_expert: bool) -> Self {
        // A replica that has all rows adds within the same parts as replicas that have one part each.
        let own =
            context.row_shards().filter(|_| is_expert).map_or(1, |shards| shards.experts.count as usize);
        let parts = own * context.copy_group.members().len();
        Self { parts, are_all: Squares::of(context, is_expert) == Squares::SUM }
    }
}
