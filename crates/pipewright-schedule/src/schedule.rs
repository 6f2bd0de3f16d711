//! The actions of each rank in order: a [`Schedule`] computes and may idle, a [`Program`] also communicates.
//!
//! Both hold their rows together with the placement and the number of microbatches. They may be unsound;
//! [`mod@crate::validate`] proves that a program is sound.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;

use thiserror::Error;

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::placement::{Placement, PlacementError};
use crate::slices::Slices;
use crate::trained::TrainedStages;
use crate::words::counted;

/// The compute actions of every rank in order, with bubbles (`None`) in which a rank idles.
pub type Schedule = Rows<Option<Action>>;

/// The actions of every rank in order: computation, and communication if the program has been lowered so far.
pub type Program = Rows<Action>;

/// The cells of every rank in order: a [`Schedule`] or a [`Program`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows<Cell> {
    placement: Placement,
    numbering: Numbering,
    trained: TrainedStages,
    rows: Vec<Vec<Cell>>,
}

/// The meaning of the microbatch numbers of actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Numbering {
    /// The number of microbatches of all batches; of all their slices, if they are cut.
    pub(crate) microbatches: u32,
    /// The number of slices of each microbatch.
    pub(crate) slices: Slices,
    /// The number of batches, which have equal numbers of microbatches. The microbatches of a batch are
    /// neighbours ([`crate::delay`]).
    pub(crate) batches: NonZeroU32,
}

impl Numbering {
    /// Returns the numbering of one batch of whole microbatches.
    pub(crate) const fn of(microbatches: u32) -> Self {
        Self { microbatches, slices: Slices::ONE, batches: NonZeroU32::MIN }
    }

    /// Returns the batch of the microbatch with this number.
    pub(crate) fn batch_of(self, microbatch: Microbatch) -> u32 {
        microbatch.get().checked_div(self.microbatches / self.batches).unwrap_or(0)
    }
}

/// Why rows do not make a schedule or a program.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ScheduleError(String);

crate::error_text::message_as_debug!(ScheduleError);

impl From<PlacementError> for ScheduleError {
    fn from(error: PlacementError) -> Self {
        Self(error.to_string())
    }
}

impl<Cell> Rows<Cell> {
    /// Makes the rows of a generator or a pass, which has checked the sizes. A pass adds at most a few times the
    /// number of actions.
    pub(crate) fn made(placement: Placement, numbering: Numbering, rows: Vec<Vec<Cell>>) -> Self {
        debug_assert_eq!(rows.len(), placement.ranks() as usize);
        Self { placement, numbering, trained: TrainedStages::ALL, rows }
    }

    /// Returns what the microbatch numbers of the actions mean.
    pub(crate) fn numbering(&self) -> Numbering {
        self.numbering
    }

    /// Returns the same rows with numbers of slices instead of microbatches ([`crate::slices`]).
    ///
    /// # Errors
    /// When the numbers do not make whole microbatches.
    pub fn with_slices(self, slices: Slices) -> Result<Self, ScheduleError> {
        let numbers = self.numbering.microbatches;
        let of_batches = slices.get().saturating_mul(self.numbering.batches.get());
        if !numbers.is_multiple_of(of_batches) {
            return Err(ScheduleError(format!(
                "the actions number {numbers} slices, which do not make microbatches of {slices}; use a number that divides \
                 {numbers}"
            )));
        }
        Ok(Self { numbering: Numbering { slices, ..self.numbering }, ..self })
    }

    /// Returns the same rows, whose microbatches belong to so many batches in equal parts ([`crate::delay`]).
    ///
    /// # Errors
    /// When the microbatches do not make equal batches.
    pub fn with_batches(self, batches: NonZeroU32) -> Result<Self, ScheduleError> {
        let Numbering { microbatches, slices, .. } = self.numbering;
        let whole = microbatches / slices.get();
        if batches.get() > whole.max(1) || !whole.is_multiple_of(batches.get()) {
            return Err(ScheduleError(format!(
                "{whole} microbatches do not make {batches} equal batches; use a number that divides {whole}"
            )));
        }
        Ok(Self { numbering: Numbering { batches, ..self.numbering }, ..self })
    }

    /// Returns the same rows for a model of which these stages are trained. The others have no weight
    /// gradients, and those below the first trained one run forward only.
    #[must_use]
    pub fn with_trained(self, trained: TrainedStages) -> Self {
        Self { trained, ..self }
    }

    /// Returns the stages that are trained.
    pub fn trained(&self) -> &TrainedStages {
        &self.trained
    }

    /// Returns the placement of the stages.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the number of microbatches in a step; of all their slices, if they are cut
    /// ([`crate::slices`]). With several batches ([`crate::delay`]), it is the number of all of them.
    pub fn microbatches(&self) -> u32 {
        self.numbering.microbatches
    }

    /// Returns the number of slices of each microbatch.
    pub fn slices(&self) -> Slices {
        self.numbering.slices
    }

    /// Returns the number of batches ([`crate::delay`]).
    pub fn batches(&self) -> u32 {
        self.numbering.batches.get()
    }

    /// Returns the batch of the microbatch with this number. Batches count from 0.
    pub fn batch_of(&self, microbatch: Microbatch) -> u32 {
        self.numbering.batch_of(microbatch)
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.placement.ranks()
    }

    /// The cells of `rank`; empty if there is no such rank.
    pub fn row(&self, rank: Rank) -> &[Cell] {
        self.rows.get(rank.index()).map_or(&[], Vec::as_slice)
    }

    /// All rows, in rank order.
    pub fn rows(&self) -> &[Vec<Cell>] {
        &self.rows
    }
}

impl Schedule {
    /// Makes a schedule from its rows, one for each rank.
    ///
    /// # Errors
    /// When the number of rows differs from the number of ranks, a cell does not compute, or the sizes are
    /// far too large for the number of cells.
    pub fn new(
        placement: Placement,
        microbatches: u32,
        rows: Vec<Vec<Option<Action>>>,
    ) -> Result<Self, ScheduleError> {
        for (rank, row) in rows.iter().enumerate() {
            let cells = row.iter().enumerate().filter_map(|(position, cell)| Some((position, (*cell)?)));
            if let Some((position, action)) = cells.into_iter().find(|(_, action)| !action.is_compute()) {
                return Err(ScheduleError(format!(
                    "rank {rank}, position {position}: {action} does not compute, and a schedule holds computation alone"
                )));
            }
        }
        let actions = rows.iter().map(|row| row.iter().flatten().count() as u64).sum();
        check_sizes(&placement, microbatches, rows.len(), actions)?;
        Ok(Self::made(placement, Numbering::of(microbatches), rows))
    }

    /// Makes a schedule, and infers the placement and the number of microbatches from the rows.
    ///
    /// # Errors
    /// When [`Schedule::new`] refuses the rows, or when a stage is on two ranks or on none.
    pub fn infer(rows: Vec<Vec<Option<Action>>>) -> Result<Self, ScheduleError> {
        let (placement, microbatches) = infer_sizes(rows.iter().map(|row| row.iter().copied().flatten()))?;
        Self::new(placement, microbatches, rows)
    }

    /// Returns whether each stage adds the gradients of whole microbatches in ascending order.
    pub fn adds_in_order(&self) -> bool {
        let mut last: HashMap<StageIndex, Microbatch> = HashMap::new();
        let parts = self.rows.iter().flatten().flatten().flat_map(|action| action.parts());
        let adding =
            parts.filter(|action| matches!(action.kind(), ActionKind::WeightBackward | ActionKind::Backward));
        let mut added = adding.filter_map(|action| Some((action.stage(), action.microbatch()?)));
        self.slices().is_one()
            && added.all(|(stage, microbatch)| {
                last.insert(stage, microbatch).is_none_or(|last| last < microbatch)
            })
    }
}

impl Program {
    /// Makes a program from its rows, one for each rank.
    ///
    /// # Errors
    /// When the number of rows differs from the number of ranks, or the sizes are far too large for the
    /// number of actions.
    pub fn new(
        placement: Placement,
        microbatches: u32,
        rows: Vec<Vec<Action>>,
    ) -> Result<Self, ScheduleError> {
        let actions = rows.iter().map(|row| row.len() as u64).sum();
        check_sizes(&placement, microbatches, rows.len(), actions)?;
        Ok(Self::made(placement, Numbering::of(microbatches), rows))
    }

    /// Makes a program, and infers the placement and the number of microbatches from the rows.
    ///
    /// # Errors
    /// When [`Program::new`] refuses the rows, or when a stage is on two ranks or on none.
    pub fn infer(rows: Vec<Vec<Action>>) -> Result<Self, ScheduleError> {
        let (placement, microbatches) = infer_sizes(rows.iter().map(|row| row.iter().copied()))?;
        Self::new(placement, microbatches, rows)
    }

    /// Returns the computation of the program in the same order, without communication.
    pub fn computation(&self) -> Schedule {
        let compute = |row: &Vec<Action>| {
            row.iter().copied().filter(|action| action.is_compute()).map(Some).collect::<Vec<_>>()
        };
        let rows = self.rows.iter().map(compute).collect();
        Schedule::made(self.placement.clone(), self.numbering, rows).with_trained(self.trained.clone())
    }

    /// Makes the program of the actions of `schedule`, in the same order and without its bubbles.
    pub(crate) fn without_bubbles(schedule: &Schedule) -> Self {
        let without = |row: &Vec<Option<Action>>| {
            let mut actions = Vec::with_capacity(row.iter().flatten().count());
            actions.extend(row.iter().flatten());
            actions
        };
        let rows = schedule.rows.iter().map(without).collect();
        Self::made(schedule.placement.clone(), schedule.numbering, rows)
            .with_trained(schedule.trained.clone())
    }

    /// Applies `pass` to the rows one after another, so that a large program is not held in memory twice. The
    /// pass keeps the stages and microbatches, so the sizes are not checked again.
    pub(crate) fn map_rows(mut self, mut pass: impl FnMut(Rank, Vec<Action>) -> Vec<Action>) -> Self {
        for (rank, row) in (0..).map(Rank::new).zip(&mut self.rows) {
            *row = pass(rank, std::mem::take(row));
        }
        self
    }
}

/// Refuses rows that do not match the ranks, and sizes with which a table over stages and microbatches would
/// be much larger than the actions.
pub(crate) fn check_sizes(
    placement: &Placement,
    microbatches: u32,
    rows: usize,
    actions: u64,
) -> Result<(), ScheduleError> {
    if rows != placement.ranks() as usize {
        let (rows, ranks) = (counted(rows, "row"), counted(placement.ranks(), "rank"));
        return Err(ScheduleError(format!("{rows} for {ranks}; give one row to each rank")));
    }
    if actions > u64::from(u32::MAX) {
        return Err(ScheduleError(format!(
            "{actions} actions are more than the {} that a program holds; use fewer ranks, stages or microbatches",
            u32::MAX
        )));
    }
    let stages = placement.stages();
    let forwards = u64::from(stages) * u64::from(microbatches);
    // A sound program has a forward for each pair. The slack admits programs that lack many actions, so that
    // validation can name the missing ones.
    if forwards > 1024 + 8 * actions {
        return Err(ScheduleError(format!(
            "{} and {} need {}, and there are only {}; check for a microbatch number that is too large",
            counted(stages, "stage"),
            counted(microbatches, "microbatch"),
            counted(forwards, "forward"),
            counted(actions, "action")
        )));
    }
    Ok(())
}

/// Infers the placement and the number of microbatches from rows of actions.
pub(crate) fn infer_sizes<Row: Iterator<Item = Action>>(
    rows: impl Iterator<Item = Row>,
) -> Result<(Placement, u32), ScheduleError> {
    // A map, because a large stage number in a malicious file must not cause a large allocation.
    let mut owners: BTreeMap<StageIndex, Rank> = BTreeMap::new();
    let mut last_microbatch = None;
    for (rank, row) in (0..).map(Rank::new).zip(rows) {
        for part in row.flat_map(Action::parts) {
            last_microbatch = last_microbatch.max(part.microbatch());
            let (stage, first) = (part.stage(), *owners.entry(part.stage()).or_insert(rank));
            if first != rank {
                return Err(ScheduleError(format!(
                    "stage {stage} runs on rank {first} and on rank {rank}; a stage belongs to exactly one rank"
                )));
            }
        }
    }
    let Some((&largest, _)) = owners.last_key_value() else {
        let advice = "write one row per rank, with cells such as `0F0`";
        return Err(ScheduleError(format!("no action in any row; {advice}")));
    };
    let missing = (0..).map(StageIndex::new).zip(owners.keys()).find(|(expected, found)| expected != *found);
    if let Some((stage, _)) = missing {
        let problem =
            format!("stage {stage} is missing, though stage {largest} exists; every stage needs a rank");
        return Err(ScheduleError(problem));
    }
    let placement = Placement::explicit(owners.into_values().collect())?;
    let microbatches = last_microbatch.map_or(0, |last| last.get().saturating_add(1));
    Ok((placement, microbatches))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rows: &[&str], expected: Result<(&[u32], u32), &str>) {
        let rows =
            rows.iter().map(|row| row.split_whitespace().map(|cell| cell.parse().expect(cell)).collect());
        let found = Program::infer(rows.collect());
        match (found, expected) {
            (Ok(program), Ok((ranks, microbatches))) => {
                let placement = program.placement();
                let found: Vec<u32> =
                    placement.all_stages().map(|stage| placement.rank_of(stage).get()).collect();
                assert_eq!((found.as_slice(), program.microbatches()), (ranks, microbatches));
            }
            (Err(error), Err(message)) => assert_eq!(error.to_string(), message),
            (found, _) => panic!("unexpected {found:?}"),
        }
    }

    #[test]
    fn placement_follows_from_the_rows() {
        check(&["0F0 1F0 0F1 1F1"], Ok((&[0, 0], 2)));
        check(&["0F0 3F0", "1F0 2F0"], Ok((&[0, 1, 1, 0], 1)));
        check(&["(0F1;1B0)OVERLAP_F_B"], Ok((&[0, 0], 2)));
    }

    #[test]
    fn errors_name_stage_and_ranks() {
        check(
            &["0F0", "0F1"],
            Err("stage 0 runs on rank 0 and on rank 1; a stage belongs to exactly one rank"),
        );
        check(&["0F0", "2F0"], Err("stage 1 is missing, though stage 2 exists; every stage needs a rank"));
        check(
            &["16777215F0"],
            Err("stage 0 is missing, though stage 16777215 exists; every stage needs a rank"),
        );
        check(
            &["0F0", "", "1F0"],
            Err("rank 1 owns no stage; give it one, or number the ranks without gaps"),
        );
        check(&["0F0", ""], Err("2 rows for 1 rank; give one row to each rank"));
        check(
            &["0F4294967295"],
            Err(
                "1 stage and 4294967295 microbatches need 4294967295 forwards, and there are only 1 action; \
                 check for a microbatch number that is too large",
            ),
        );
    }

    #[test]
    fn a_schedule_holds_computation_alone() {
        let rows = vec![vec![None, Some("0UNSHARD".parse().expect("an action"))]];
        let error = Schedule::infer(rows).expect_err("an action that does not compute");
        let message = "rank 0, position 1: 0UNSHARD does not compute, and a schedule holds computation alone";
        assert_eq!(error.to_string(), message);
    }
}
