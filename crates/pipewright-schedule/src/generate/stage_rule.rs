//! The stages that a schedule has on each rank, and their placement.

use crate::generate::error::GenerateErrorKind;
use crate::placement::{Placement, PlacementError};

/// The numbers of stages on each rank that a schedule runs, and the placement of the stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StageRule {
    /// One stage on each rank.
    One,
    /// Any number of stages on each rank, placed in a loop over the ranks; two by default.
    Loops,
    /// Two stages on each rank, placed in a loop over the ranks.
    TwoLoops,
    /// Two stages on each rank, placed down the ranks and up again.
    V,
    /// An even number of stages on each rank, placed down the ranks and up again several times; two by
    /// default.
    Vs,
}

impl StageRule {
    /// Returns the number of stages on each rank of a schedule for which `requested` are requested.
    pub(super) fn stages_per_rank(
        self,
        schedule: &'static str,
        requested: Option<u32>,
    ) -> Result<u32, GenerateErrorKind> {
        let usual = if self == Self::One { 1 } else { 2 };
        let requested = requested.unwrap_or(usual);
        match self {
            Self::Loops => Ok(requested),
            Self::Vs if requested.is_multiple_of(2) => Ok(requested),
            Self::Vs => Err(GenerateErrorKind::OddStagesPerRank { schedule, requested }),
            Self::One | Self::TwoLoops | Self::V if requested == usual => Ok(requested),
            Self::One | Self::TwoLoops | Self::V => {
                Err(GenerateErrorKind::StagesPerRank { schedule, requested, supported: usual })
            }
        }
    }

    /// Returns the placement.
    pub(super) fn placement(self, ranks: u32, stages_per_rank: u32) -> Result<Placement, PlacementError> {
        match self {
            Self::One | Self::Loops | Self::TwoLoops => Placement::looped(ranks, stages_per_rank),
            Self::V | Self::Vs => Placement::v(ranks, stages_per_rank),
        }
    }

    /// Returns the most idle cells of a rank, as a number of microbatches of one of its stages.
    pub(super) fn idle(self, ranks: u32) -> u64 {
        if self == Self::One { 0 } else { 2 * u64::from(ranks) }
    }
}
