//! The choice of passes, and lists of passes over rows.

use pipewright_schedule::lower::{Pass, PassInput, apply, check_messages, check_order};
use pipewright_schedule::{Costs, Level, LowerConfig, LowerError, Placement, Program, Slices};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::arguments::named;
use crate::errors::{Raised, type_error, value_error};
use crate::interrupt::interruptible;
use crate::rows::Cells;

/// Reads a list of passes, or the text of one with commas.
pub(crate) fn passes_of(py: Python<'_>, passes: &Bound<'_, PyAny>) -> PyResult<Vec<Pass>> {
    let texts: Vec<String> = match passes.cast::<PyString>() {
        Ok(text) => text.to_string().split(',').map(|pass| pass.trim().to_owned()).collect(),
        Err(_) => passes.extract().map_err(|_| type_error("passes are not a list of names of passes"))?,
    };
    let passes = texts.iter().map(|pass| named(py, pass)).collect::<PyResult<Vec<Pass>>>()?;
    check_order(&passes).map_err(|error| error.raised(py))?;
    Ok(passes)
}

/// Rows to lower, with the sizes that they may not show.
pub(crate) struct Unlowered {
    pub(crate) cells: Cells,
    pub(crate) placement: Placement,
    /// The number of microbatches, or of all their slices.
    pub(crate) microbatches: u32,
    pub(crate) slices: Slices,
}

impl Unlowered {
    /// Runs passes over the rows, and returns the program that they make.
    pub(crate) fn lowered(self, py: Python<'_>, passes: Vec<Pass>) -> PyResult<Program> {
        let Self { cells: rows, placement, microbatches, slices } = self;
        check_messages(&rows, &passes).map_err(|error| error.raised(py))?;
        let lowered = interruptible(py, move |_| {
            let stage_to_rank = Some(placement.all_stages().map(|stage| placement.rank_of(stage)).collect());
            let program =
                apply(PassInput { rows, stage_to_rank, microbatches: Some(microbatches) }, &passes)?;
            Ok(program.with_slices(slices)?)
        })?;
        lowered.map_err(|error: LowerError| error.raised(py))
    }
}

/// Returns the passes of a level, or without a level the passes of the program that Pipewright trains with at
/// `costs`.
pub(crate) fn passes_to(py: Python<'_>, level: Option<&str>, costs: &Costs) -> PyResult<LowerConfig> {
    match level {
        Some(level) => Ok(LowerConfig::from(named::<Level>(py, level)?)),
        None => Ok(LowerConfig::training_at(costs)),
    }
}

/// Refuses passes and a level together.
pub(crate) fn check_choice(passes: bool, level: bool) -> PyResult<()> {
    if passes && level {
        return Err(value_error("passes and level are given, and a level has its own passes; leave one out"));
    }
    Ok(())
}
