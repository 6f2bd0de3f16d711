//! The replicas that hold the experts of each mixture together: each holds some of the experts, and the tokens
//! of all of them are sent to the replicas of their experts and back.
//!
//! A replica computes the rows of each replica's tokens as rows of their own, and keeps a sum of weight
//! gradients for each replica. So a product has the operands that it would have if every replica held all
//! experts. The sums over replicas are added in the same order, because a group has 2, 4, 8 or more replicas,
//! or all of them. So bits do not depend on the size of the group.

use std::ops::Range;
use std::sync::Arc;

use super::tensor_link::{TensorLink, part};
use crate::random::is_probing;
use crate::tensor::ExpertRank;

/// A replica's place among the replicas that hold the experts of each mixture together, and its connection to
/// them.
///
/// All replicas of a group must run the same mixtures in the same order. They do if they have the same stages
/// and run the same program.
#[derive(Clone, Debug)]
pub struct ExpertParallel {
    rank: ExpertRank,
    /// `None` if the replica holds all experts.
    link: Option<Arc<dyn TensorLink>>,
}

impl Default for ExpertParallel {
    /// A replica that holds all experts.
    fn default() -> Self {
        Self::unconnected(ExpertRank { index: 0, of: 1 })
    }
}

impl ExpertParallel {
    pub(crate) fn new(rank: ExpertRank, link: Arc<dyn TensorLink>) -> Self {
        Self { rank, link: Some(link).filter(|_| rank.of > 1) }
    }

    /// Returns the place of a replica without its connection, to describe what the replica holds. Do not
    /// compute with it: a mixture contains only this replica's experts.
    pub fn unconnected(rank: ExpertRank) -> Self {
        Self { rank, link: None }
    }

    /// Returns the replica's place in the group.
    pub fn rank(&self) -> ExpertRank {
        self.rank
    }

    /// Returns the number of replicas of the group.
    pub fn ranks(&self) -> u32 {
        self.rank.of
    }

    /// Returns the experts of a mixture of `count` experts that this replica holds, which are neighbours. The
    /// number of replicas must divide `count`, which a layer should check.
    pub fn experts(&self, count: usize) -> Range<usize> {
        self.experts_of(self.rank.index as usize, count)
    }

    /// Returns the experts that the replica at `index` of the group holds.
    pub(super) fn experts_of(&self, index: usize, count: usize) -> Range<usize> {
        part(count, index, self.rank.of as usize)
    }

    /// Returns the connection to the other replicas, if tokens are sent to them.
    pub(super) fn link(&self) -> Option<&Arc<dyn TensorLink>> {
        self.link.as_ref().filter(|_| !is_probing())
    }
}
