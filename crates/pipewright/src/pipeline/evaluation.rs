//! The program of evaluations: the forward part of the training program, or another schedule over the same stages.

use std::sync::Arc;

use pipewright_schedule::lower::forward_part;
use pipewright_schedule::{Level, ValidatedProgram};

use super::error::PipelineError;
use crate::config::PipelineConfig;

/// Returns the program of evaluations that the configuration gives, or that `program` itself is; `None` if its forward part
/// is to be made when it is needed.
pub(super) fn evaluation_program(
    program: &Arc<ValidatedProgram>,
    config: &PipelineConfig,
) -> Result<Option<Arc<ValidatedProgram>>, PipelineError> {
    let Some(given) = &config.evaluation else {
        return Ok(program.is_forward_only().then(|| program.clone()));
    };
    if given.placement() != program.placement() {
        return Err(PipelineError::EvaluationPlacement);
    }
    if given.slices() != program.slices() {
        return Err(PipelineError::EvaluationSlices { found: given.slices(), expected: program.slices() });
    }
    if given.level() == Level::Compute && given.ranks() > 1 {
        return Err(PipelineError::NotLowered { level: given.level() });
    }
    if config.is_sharded() && given.level() != Level::Full {
        return Err(PipelineError::NeverGathers { level: given.level() });
    }
    if given.is_forward_only() {
        return Ok(Some(given.clone()));
    }
    let forwards = forward_part(given).map_err(PipelineError::NoEvaluation)?;
    Ok(Some(Arc::new(forwards)))
}
