//! The placement of stages on ranks, and the numbering of a rank's stages as chunks.
//!
//! [`mod@crate::partition`] decides which layers a stage has, and [`mod@crate::generate`] when a stage runs.
//!
//! ```
//! use pipewright_schedule::{Placement, Rank, StageIndex};
//! let placement = Placement::v(2, 2)?;
//! assert_eq!(placement.stages_of(Rank::new(0)), [StageIndex::new(0), StageIndex::new(3)]);
//! # Ok::<(), pipewright_schedule::PlacementError>(())
//! ```

use thiserror::Error;

use crate::ids::{Chunk, Rank, StageIndex};
use crate::words::counted;

/// The largest number of stages that a placement holds: the number of stage indices.
pub const MAX_STAGES: u64 = StageIndex::LARGEST as u64 + 1;

/// A map from stages to ranks in which every rank owns at least one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    rank_of: Vec<Rank>,
    chunk_of: Vec<Chunk>,
    /// The stages sorted by rank, ascending within a rank.
    by_rank: Vec<StageIndex>,
    /// The position in `by_rank` at which each rank's stages begin, with a final entry for the end.
    starts: Vec<u32>,
}

/// Why stages cannot be placed on ranks.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct PlacementError(String);

crate::error_text::message_as_debug!(PlacementError);

impl Placement {
    /// Places stage `s` on rank `s mod ranks`: the loop of interleaved schedules. With one stage per rank it
    /// is the plain pipeline.
    ///
    /// # Errors
    /// When either number is zero, or there are more than [`MAX_STAGES`] stages.
    pub fn looped(ranks: u32, stages_per_rank: u32) -> Result<Self, PlacementError> {
        let stages = checked_stages(ranks, stages_per_rank)?;
        Self::explicit((0..stages).map(|stage| Rank::new(stage % ranks)).collect())
    }

    /// Places the stages down the ranks and up again. With two stages per rank, rank `r` owns stages `r` and
    /// `2 * ranks - 1 - r`. The two stages at a turning point share a rank and need no communication.
    ///
    /// # Errors
    /// When either number is zero, or there are more than [`MAX_STAGES`] stages.
    pub fn v(ranks: u32, stages_per_rank: u32) -> Result<Self, PlacementError> {
        let stages = checked_stages(ranks, stages_per_rank)?;
        let rank_at = |stage: u32| {
            if (stage / ranks).is_multiple_of(2) { stage % ranks } else { ranks - 1 - stage % ranks }
        };
        Self::explicit((0..stages).map(|stage| Rank::new(rank_at(stage))).collect())
    }

    /// Places stage `s` on rank `rank_of[s]`. The number of ranks is the largest rank plus one.
    ///
    /// # Errors
    /// When the list is empty, too long, or omits a rank below its largest.
    pub fn explicit(rank_of: Vec<Rank>) -> Result<Self, PlacementError> {
        let stages = rank_of.len() as u64;
        if stages > MAX_STAGES {
            return Err(too_many(stages));
        }
        let Some(last) = rank_of.iter().max() else {
            return Err(empty(0, 0));
        };
        // A rank above the number of stages means that there is a gap. Without this limit, one large number
        // in the input would allocate memory without bound.
        let ranks = last.index().min(rank_of.len()) + 1;
        let mut counts = vec![0u32; ranks];
        for rank in rank_of.iter().filter(|rank| rank.index() < ranks) {
            counts[rank.index()] += 1;
        }
        if let Some(idle) = counts.iter().position(|&count| count == 0) {
            let advice = "give it one, or number the ranks without gaps";
            return Err(PlacementError(format!("rank {idle} owns no stage; {advice}")));
        }
        Ok(Self::grouped(rank_of, &counts))
    }

    /// Sorts the stages by rank; `counts` holds the number of stages of each rank.
    fn grouped(rank_of: Vec<Rank>, counts: &[u32]) -> Self {
        let mut starts = Vec::with_capacity(counts.len() + 1);
        starts.push(0);
        for count in counts {
            starts.push(starts[starts.len() - 1] + count);
        }
        let mut next = starts.clone();
        let mut by_rank = vec![StageIndex::new(0); rank_of.len()];
        let mut chunk_of = Vec::with_capacity(rank_of.len());
        for (stage, rank) in (0..).zip(&rank_of) {
            let slot = &mut next[rank.index()];
            chunk_of.push(Chunk::new(*slot - starts[rank.index()]));
            by_rank[*slot as usize] = StageIndex::new(stage);
            *slot += 1;
        }
        Self { rank_of, chunk_of, by_rank, starts }
    }

    /// Returns the number of stages on each rank, rounded down if ranks have different numbers.
    pub fn stages_per_rank(&self) -> u32 {
        self.stages() / self.ranks().max(1)
    }

    /// The number of ranks.
    pub fn ranks(&self) -> u32 {
        self.starts.len() as u32 - 1
    }

    /// The number of stages.
    pub fn stages(&self) -> u32 {
        self.rank_of.len() as u32
    }

    /// The rank that owns `stage`.
    ///
    /// # Panics
    /// When `stage` is not below [`Placement::stages`]. [`Placement::owner`] does not panic.
    pub fn rank_of(&self, stage: StageIndex) -> Rank {
        self.rank_of[stage.index()]
    }

    /// Returns the rank that owns `stage`, or `None` if there is no such stage.
    pub fn owner(&self, stage: StageIndex) -> Option<Rank> {
        self.rank_of.get(stage.index()).copied()
    }

    /// Returns the stages of `rank`, ascending; empty if there is no such rank.
    pub fn stages_of(&self, rank: Rank) -> &[StageIndex] {
        match self.starts.get(rank.index()..rank.index().saturating_add(2)) {
            Some(&[start, end]) => &self.by_rank[start as usize..end as usize],
            _ => &[],
        }
    }

    /// Returns the position of `stage` among the stages of its rank.
    ///
    /// # Panics
    /// When `stage` is not below [`Placement::stages`].
    pub fn chunk_of(&self, stage: StageIndex) -> Chunk {
        self.chunk_of[stage.index()]
    }

    /// The stage that reads the batch.
    pub fn first_stage(&self) -> StageIndex {
        StageIndex::new(0)
    }

    /// The stage that computes the loss.
    pub fn last_stage(&self) -> StageIndex {
        StageIndex::new(self.stages() - 1)
    }

    /// The stage after `stage` in the model, or `None` for the last stage and for stages that do not exist.
    pub fn next(&self, stage: StageIndex) -> Option<StageIndex> {
        (stage < self.last_stage()).then(|| StageIndex::new(stage.get() + 1))
    }

    /// The stage before `stage` in the model, or `None` for the first stage and for stages that do not exist.
    pub fn previous(&self, stage: StageIndex) -> Option<StageIndex> {
        (stage <= self.last_stage()).then(|| stage.get().checked_sub(1).map(StageIndex::new)).flatten()
    }

    /// All ranks, ascending.
    pub fn all_ranks(&self) -> impl DoubleEndedIterator<Item = Rank> + ExactSizeIterator + use<> {
        (0..self.ranks()).map(Rank::new)
    }

    /// All stages, ascending.
    pub fn all_stages(&self) -> impl DoubleEndedIterator<Item = StageIndex> + ExactSizeIterator + use<> {
        (0..self.stages()).map(StageIndex::new)
    }
}

/// Returns `ranks * stages_per_rank`, if so many stages can be placed.
fn checked_stages(ranks: u32, stages_per_rank: u32) -> Result<u32, PlacementError> {
    let stages = u64::from(ranks) * u64::from(stages_per_rank);
    match stages {
        0 => Err(empty(ranks, stages_per_rank)),
        1..=MAX_STAGES => Ok(stages as u32),
        _ => Err(too_many(stages)),
    }
}

fn empty(ranks: u32, stages_per_rank: u32) -> PlacementError {
    let (ranks, stages) = (counted(ranks, "rank"), counted(stages_per_rank, "stage"));
    PlacementError(format!(
        "a placement of {ranks} with {stages} each has no stage; use at least one of both"
    ))
}

fn too_many(stages: u64) -> PlacementError {
    let most = format!("the {MAX_STAGES} that a placement holds; use fewer ranks or stages");
    PlacementError(format!("{stages} stages are more than {most}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(placement: Result<Placement, PlacementError>, rows: &[&[u32]]) {
        let placement = placement.expect("the placement exists");
        assert_eq!(placement.ranks() as usize, rows.len());
        for (rank, stages) in placement.all_ranks().zip(rows) {
            let found: Vec<u32> = placement.stages_of(rank).iter().map(|stage| stage.get()).collect();
            assert_eq!(&found, stages);
            for (chunk, &stage) in stages.iter().enumerate() {
                assert_eq!(placement.rank_of(StageIndex::new(stage)), rank);
                assert_eq!(placement.chunk_of(StageIndex::new(stage)).index(), chunk);
            }
        }
    }

    fn check_explicit(ranks: &[u32], expected: Result<&[&[u32]], PlacementError>) {
        let placement = Placement::explicit(ranks.iter().copied().map(Rank::new).collect());
        match expected {
            Ok(rows) => check(placement, rows),
            Err(error) => assert_eq!(placement, Err(error)),
        }
    }

    #[test]
    fn loops_and_turns() {
        check(Placement::looped(3, 1), &[&[0], &[1], &[2]]);
        check(Placement::looped(2, 3), &[&[0, 2, 4], &[1, 3, 5]]);
        check(Placement::v(3, 2), &[&[0, 5], &[1, 4], &[2, 3]]);
        check(Placement::v(2, 3), &[&[0, 3, 4], &[1, 2, 5]]);
        check(Placement::v(1, 2), &[&[0, 1]]);
    }

    #[test]
    fn explicit_lists() {
        check_explicit(&[1, 0, 1], Ok(&[&[1], &[0, 2]]));
        check_explicit(
            &[0, 2],
            Err(PlacementError(
                "rank 1 owns no stage; give it one, or number the ranks without gaps".to_owned(),
            )),
        );
        check_explicit(
            &[0, u32::MAX],
            Err(PlacementError(
                "rank 1 owns no stage; give it one, or number the ranks without gaps".to_owned(),
            )),
        );
        check_explicit(&[], Err(empty(0, 0)));
    }

    #[test]
    fn refuses_sizes_that_cannot_be() {
        assert_eq!(Placement::looped(0, 2), Err(empty(0, 2)));
        assert_eq!(Placement::v(2, 0), Err(empty(2, 0)));
        let stages = u64::from(u32::MAX) * 4;
        assert_eq!(Placement::looped(u32::MAX, 4), Err(too_many(stages)));
    }

    #[test]
    fn neighbours_end_with_the_model() {
        let placement = Placement::looped(2, 1).expect("the placement exists");
        assert_eq!(placement.next(StageIndex::new(0)), Some(StageIndex::new(1)));
        assert_eq!(placement.next(StageIndex::new(1)), None);
        assert_eq!(placement.previous(StageIndex::new(0)), None);
        assert_eq!(placement.previous(StageIndex::new(7)), None);
        assert_eq!(placement.owner(StageIndex::new(7)), None);
        assert!(placement.stages_of(Rank::new(u32::MAX)).is_empty());
    }
}
