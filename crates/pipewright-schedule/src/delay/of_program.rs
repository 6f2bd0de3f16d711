//! The repeating rows of a program that trains, for ranks that run two batches at once.

use super::Delayed;
use super::delayed_action::DelayError;
use crate::action::Action;
use crate::costs::Costs;
use crate::level::Level;
use crate::schedule::{Program, Schedule};
use crate::validate::{ValidatedProgram, check};

impl Delayed {
    /// Makes batches of `program` overlap, for equal costs of all stages, and proves any number of them sound. A rank
    /// computes each batch in the order of its row of the program.
    ///
    /// # Errors
    /// When actions of the program depend on more than their batch: it moves tensors out of memory, gathers parameters,
    /// keeps overlaps or cuts microbatches into slices; when it does not train all stages; or as [`Delayed::of`].
    pub fn of_program(program: &ValidatedProgram) -> Result<Self, DelayError> {
        let is_refused = |action: &&Action| {
            let is_overlap = matches!(action, Action::Overlap(_));
            is_overlap || action.kind().is_offload() || matches!(action, Action::Unshard { .. })
        };
        let rows = program.as_program().rows();
        if let Some(action) = rows.iter().flatten().find(is_refused) {
            return Err(DelayError(format!("{action} depends on more than its batch")));
        }
        if !program.slices().is_one() || !program.as_program().trained().are_all() {
            return Err(DelayError("the program has slices, or stages that are not trained".to_owned()));
        }
        let compute = |row: &Vec<Action>| -> Vec<Option<Action>> {
            row.iter().copied().filter(|action| action.is_compute()).map(Some).collect()
        };
        let rows = rows.iter().map(compute).collect();
        let schedule = Schedule::new(program.placement().clone(), program.microbatches(), rows);
        let schedule = schedule.map_err(|error| DelayError(error.to_string()))?;
        let delayed = Self::of(&schedule, &Costs::default())?;
        let batches = Program::without_bubbles(&delayed.batches(delayed.enough_batches())?);
        let report = check(&batches, Level::Compute);
        if report.total() > 0 {
            return Err(DelayError(report.into_violations(batches).to_string()));
        }
        Ok(delayed)
    }

    /// Returns, for each rank, whether each computation of its repeating row belongs to the next batch. The ones of the next
    /// batch are the first computations of a batch, and the others are the rest of it.
    pub fn turns(&self) -> Vec<Vec<bool>> {
        self.rows.iter().map(|row| row.iter().map(|cell| cell.is_next).collect()).collect()
    }
}
