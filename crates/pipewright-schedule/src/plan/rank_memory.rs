//! The memory of each rank of a pipeline.

use crate::plan::request::PlanRequest;
use crate::profile::Profile;

/// The bytes that each rank has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RankMemory {
    /// All ranks have as many.
    Equal(u64),
    /// The bytes of each rank, the largest number for any amount.
    Own(Vec<u64>),
}

impl RankMemory {
    /// Returns the memory of the ranks of a profile; `None` if it is not limited.
    pub(super) fn of(profile: &Profile, request: &PlanRequest) -> Option<Self> {
        if profile.ranks.iter().all(|rank| rank.memory_bytes.is_none()) {
            return request.memory.map(Self::Equal);
        }
        let otherwise = request.memory.unwrap_or(u64::MAX);
        Some(Self::Own(profile.ranks.iter().map(|rank| rank.memory_bytes.unwrap_or(otherwise)).collect()))
    }

    /// Returns the bytes of a rank.
    pub(super) fn of_rank(&self, rank: usize) -> u64 {
        match self {
            Self::Equal(bytes) => *bytes,
            Self::Own(bytes) => bytes.get(rank).copied().unwrap_or(u64::MAX),
        }
    }

    /// Returns the bytes of `ranks` ranks together.
    pub(super) fn total(&self, ranks: u32) -> u128 {
        match self {
            Self::Equal(bytes) => u128::from(*bytes) * u128::from(ranks),
            Self::Own(bytes) => bytes.iter().map(|&bytes| u128::from(bytes)).sum(),
        }
    }
}
