//! The chunks of each rank that a timeline shows.
//!
//! A timeline does not hold the placement, so a rank's chunks are the stages that its events name, ascending.

use crate::action::Action;
use crate::ids::{Rank, StageIndex};
use crate::timeline::Timeline;

/// The stages that each rank runs.
pub(super) struct Chunks {
    stages: Vec<Vec<StageIndex>>,
}

impl Chunks {
    pub(super) fn of(timeline: &Timeline) -> Self {
        let stages = |rank| {
            let parts = timeline.events_of(rank).iter().flat_map(|event| event.action.parts());
            let mut stages = Vec::new();
            for stage in parts.map(Action::stage) {
                if let Err(place) = stages.binary_search(&stage) {
                    stages.insert(place, stage);
                }
            }
            stages
        };
        Self { stages: (0..timeline.ranks()).map(Rank::new).map(stages).collect() }
    }

    /// Returns the stages of `rank`, in the order of its chunks.
    pub(super) fn stages_of(&self, rank: Rank) -> &[StageIndex] {
        self.stages.get(rank.index()).map_or(&[], Vec::as_slice)
    }

    /// Returns the place of `stage` among the stages of `rank`; 0 for a stage of another rank.
    pub(super) fn chunk(&self, rank: Rank, stage: StageIndex) -> usize {
        self.stages_of(rank).binary_search(&stage).unwrap_or(0)
    }

    /// Returns the largest number of chunks on one rank; at least 1.
    pub(super) fn most(&self) -> usize {
        self.stages.iter().map(Vec::len).max().unwrap_or(1).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::Event;

    #[test]
    fn chunks_ascend_by_stage() {
        let event = |(rank, action): (u32, &str)| Event {
            rank: Rank::new(rank),
            action: action.parse().expect("an action"),
            start: 0.0,
            end: 1.0,
        };
        let events = [(0, "3F0"), (0, "(0F1;3B0)OVERLAP_F_B"), (1, "1F0"), (1, "2F0"), (1, "2SEND_F0")];
        let chunks = Chunks::of(&Timeline::new(2, events.map(event).to_vec()));
        assert_eq!(chunks.stages_of(Rank::new(0)), [StageIndex::new(0), StageIndex::new(3)]);
        assert_eq!(chunks.chunk(Rank::new(1), StageIndex::new(2)), 1);
        assert_eq!(chunks.most(), 2);
    }

    #[test]
    fn an_empty_timeline_has_one_chunk_to_colour() {
        assert_eq!(Chunks::of(&Timeline::new(0, Vec::new())).most(), 1);
        assert_eq!(Chunks::of(&Timeline::new(1, Vec::new())).most(), 1);
    }
}
