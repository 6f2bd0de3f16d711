//! Finds the first value that is not finite in a step that has failed because a loss or a gradient is not finite.
//!
//! All ranks compute the batches of the step again and check the values of the layers. A rank fails at the first value
//! that is not finite, before it sends the value on, so the values that a failing rank got were finite. If all values are
//! finite, the root of the norm fails instead. So no rank updates, and the state of the run is the one before the step.
//!
//! In several processes, each knows the first cause of the failed step, and begins the search if that cause is a number
//! that is not finite.

use std::sync::Arc;
use std::time::Instant;

use super::begun::Condition;
use super::error::PipelineError;
use super::running::Pipeline;
use super::step_failure::StepFailure;
use super::step_plan::{CheckedBatch, StepPlan};
use super::summary::StepSummary;
use crate::failure::{Cause, NotFiniteOrigin, StepError};
use crate::ids::StepNumber;

impl Pipeline {
    /// Returns the error of a step whose batches are `batches`, with the first value that is not finite if the error is
    /// a number that is not finite. `done` is the step before.
    pub(super) fn with_origin(
        &mut self,
        error: PipelineError,
        batches: Vec<Arc<CheckedBatch>>,
        done: StepNumber,
    ) -> PipelineError {
        let searches = self.setup.config.name_not_finite && !self.ranks.has_ended();
        let error = match error {
            PipelineError::Step(error) if searches && error.cause.is_number() => error,
            error => return error,
        };
        let failure = self.failure.take();
        let origin = self.search(batches, done);
        let StepError { rank, step, action, cause } = error;
        let cause = match origin {
            Some(origin) => Cause::Located { cause: Box::new(cause), origin: Box::new(origin) },
            None => cause,
        };
        let error = StepError { rank, step, action, cause };
        self.failure = failure.map(|failure| StepFailure { error: error.clone(), ..failure });
        PipelineError::Step(error)
    }

    /// Computes the batches of a failed step again. Returns `None` if this fails for another reason.
    fn search(&mut self, batches: Vec<Arc<CheckedBatch>>, done: StepNumber) -> Option<NotFiniteOrigin> {
        // The failure drops the next batch.
        self.waiting.clear();
        self.setup.next_batch.clear();
        self.ranks.return_to(done);
        let last = batches.len().checked_sub(1)?;
        for (index, batch) in batches.into_iter().enumerate() {
            let batch = Arc::unwrap_or_clone(batch);
            let batch = if index == last { batch.ending_step() } else { batch };
            match self.search_batch(batch) {
                Err(PipelineError::Step(StepError { cause: Cause::Search { origin }, .. })) => {
                    return Some(*origin);
                }
                Err(_) => return None,
                Ok(_) => {}
            }
        }
        None
    }

    fn search_batch(&mut self, batch: CheckedBatch) -> Result<StepSummary, PipelineError> {
        let unit = self.accumulation.unit(batch.unit())?;
        let (at, scale) = (self.ranks.next_step(), self.accumulation.step_scale(0, &self.setup.config));
        let plan = StepPlan::training(at, &batch, unit, scale, None).searching();
        let running = self.send_planned(plan, batch, Instant::now(), Condition::None)?;
        self.await_results(running)
    }
}
