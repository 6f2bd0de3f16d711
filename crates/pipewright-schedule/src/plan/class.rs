//! The arrangements of stages on ranks that the search knows: loops and Vs, with up to [`MAX_CHUNKS`] stages
//! per rank.

use crate::placement::Placement;

/// The largest number of stages of a rank.
pub(super) const MAX_CHUNKS: u32 = 4;

/// The way in which stages are placed on the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Path {
    /// Stage `s` is on rank `s mod p`.
    Loop,
    /// Down the ranks and up again.
    V,
}

/// An arrangement of stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class {
    pub(super) ranks: u32,
    pub(super) chunks: u32,
    pub(super) path: Path,
}

impl Class {
    /// Returns all arrangements of at most `layers` stages on `ranks` ranks.
    pub(super) fn all(ranks: u32, layers: usize) -> Vec<Self> {
        let mut classes = Vec::new();
        for chunks in (1..=MAX_CHUNKS).filter(|chunks| (ranks * chunks) as usize <= layers) {
            classes.push(Self { ranks, chunks, path: Path::Loop });
            if chunks > 1 && ranks > 1 {
                classes.push(Self { ranks, chunks, path: Path::V });
            }
        }
        classes
    }

    /// Returns the arrangement of a placement, if it is one of these.
    pub(super) fn of(placement: &Placement) -> Option<Self> {
        let (ranks, stages) = (placement.ranks(), placement.stages());
        if !stages.is_multiple_of(ranks) {
            return None;
        }
        let chunks = stages / ranks;
        let classes = [Path::Loop, Path::V].map(|path| Self { ranks, chunks, path });
        classes.into_iter().find(|class| class.placement() == *placement)
    }

    /// Returns the number of stages.
    pub(super) fn stages(self) -> usize {
        self.ranks as usize * self.chunks as usize
    }

    /// Returns the rank of a stage.
    pub(super) fn rank_of(self, stage: usize) -> usize {
        let ranks = self.ranks as usize;
        match self.path {
            Path::V if !(stage / ranks).is_multiple_of(2) => ranks - 1 - stage % ranks,
            Path::Loop | Path::V => stage % ranks,
        }
    }

    /// Returns the rank of every stage.
    pub(super) fn ranks_of(self) -> Vec<u32> {
        (0..self.stages()).map(|stage| self.rank_of(stage) as u32).collect()
    }

    /// Returns the placement.
    pub(super) fn placement(self) -> Placement {
        let placed = match self.path {
            Path::Loop => Placement::looped(self.ranks, self.chunks),
            Path::V => Placement::v(self.ranks, self.chunks),
        };
        placed.expect("there is at least one rank, and at most one stage for each layer")
    }
}
