//! The order in which each rank of a program takes the computations of two batches, for a run of any number of batches.

use super::delayed_action::DelayError;
use super::Delayed;
use crate::action::Action;
use crate::costs::Costs;
use crate::level::Level;
use crate::schedule::{Program, Schedule};
use crate::validate::{ValidatedProgram, check};

/// Returns, for each rank of `program`, whether each computation of its repeating row ([`Delayed::row`]) belongs to the next
/// batch instead of the older one. A rank computes each batch in the order of its row of the program. The rows are proved
/// for any number of batches. They are made for equal costs of all stages.
///
/// # Errors
/// When actions of the program depend on more than their batch: it moves tensors out of memory, gathers parameters, keeps
/// overlaps or cuts microbatches into slices; or when it trains not all stages, or cannot be delayed ([`Delayed::of`]).
pub fn turns(program: &ValidatedProgram) -> Result<Vec<Vec<bool>>, DelayError> {
    let refused = |action: &Action| {
        let is_overlap = matches!(action, Action::Overlap(_));
        is_overlap || action.kind().is_offload() || matches!(action, Action::Unshard { .. })
    };
    let rows = program.as_program().rows();
    if let Some(action) = rows.iter().flatten().find(|action| refused(action)) {
        return Err(DelayError(format!("{action} depends on more than its batch")));
    }
    if !program.slices().is_one() || !program.as_program().trained().are_all() {
        return Err(DelayError("the program has slices, or stages that are not trained".to_owned()));
    }
    let compute = |row: &Vec<Action>| -> Vec<Option<Action>> {
        row.iter().copied().filter(|action| action.is_compute()).map(Some).collect()
    };
    let rows: Vec<Vec<Option<Action>>> = rows.iter().map(compute).collect();
    let schedule = Schedule::new(program.placement().clone(), program.microbatches(), rows);
    let schedule = schedule.map_err(|error| DelayError(error.to_string()))?;
    let delayed = Delayed::of(&schedule, &Costs::default())?;
    let batches = Program::without_bubbles(&delayed.batches(delayed.enough_batches())?);
    let report = check(&batches, Level::Compute);
    if report.total() > 0 {
        return Err(DelayError(report.into_violations(batches).to_string()));
    }
    let of_row = |(row, cells): (&Vec<Option<Action>>, &Vec<super::DelayedAction>)| {
        let of_batch = |is_next| cells.iter().filter(move |cell| cell.is_next == is_next).map(|cell| Some(cell.action));
        debug_assert!(of_batch(true).chain(of_batch(false)).eq(row.iter().copied()), "a batch has the order of its row");
        cells.iter().map(|cell| cell.is_next).collect()
    };
    Ok(schedule.rows().iter().zip(&delayed.rows).map(of_row).collect())
}
