//! The state that one training step leaves for the next one: gradients that wait for an update, and the loss
//! scale.

use super::error::PipelineError;
use crate::batch::ReductionUnit;
use crate::config::PipelineConfig;
use crate::loss_scale::{LossScale, StepScale};
use crate::tensor::Precision;

/// The state that one training step leaves for the next one.
pub(super) struct Accumulation {
    /// The unit of the batches whose gradients wait for an update; `None` if no gradients wait.
    pending: Option<ReductionUnit>,
    /// The loss scale after the last step that has ended; `None` if losses are not scaled.
    pub(super) loss_scale: Option<LossScale>,
}

impl Accumulation {
    /// Returns the state before the first step, or after a checkpoint that has the loss scale `stored`. A run in another precision
    /// has stored none.
    pub(super) fn new(config: &PipelineConfig, stored: Option<LossScale>) -> Self {
        let scale = stored.unwrap_or(LossScale::new(config.loss_scaling));
        let next = if config.delayed { scale.next } else { scale.factor };
        let is_scaled = config.precision == Precision::F16;
        Self { pending: None, loss_scale: is_scaled.then_some(LossScale { next, ..scale }) }
    }

    /// Returns whether gradients wait for an update.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Returns the unit of a batch whose own unit is `own`. If gradients wait, it is the unit of their first
    /// batch.
    pub(super) fn unit(&self, own: ReductionUnit) -> Result<ReductionUnit, PipelineError> {
        match self.pending {
            Some(pending) if !pending.is_like(own) => {
                let reason = "this batch and the batches whose gradients wait for an update reduce their losses in different \
                              ways: accumulate batches that all count by rows, by weights, or as sums";
                Err(PipelineError::batch(reason))
            }
            pending => Ok(pending.unwrap_or(own)),
        }
    }

    /// Notes that the ranks have a batch. `pending` is the unit of the batches whose gradients wait after it;
    /// `None` after an update.
    pub(super) fn begin_batch(&mut self, pending: Option<ReductionUnit>) {
        self.pending = pending;
    }

    /// Sets the loss scale after an update.
    pub(super) fn scale_losses(&mut self, config: &PipelineConfig, is_skipped: bool) {
        let after = |scale: LossScale| scale.after(is_skipped, config.delayed, config.loss_scaling);
        self.loss_scale = self.loss_scale.map(after);
    }

    /// Returns the scale of the losses of a step while `open` steps before it have not ended.
    pub(super) fn step_scale(&self, open: usize, config: &PipelineConfig) -> StepScale {
        self.loss_scale.map(|scale| scale.of_step(open, config.loss_scaling)).unwrap_or_default()
    }

    /// Returns the scale of the losses of the first step that has not ended; `None` if they are not scaled.
    pub(super) fn scale(&self) -> Option<f64> {
        self.loss_scale.map(|scale| scale.next)
    }

    /// Drops the gradients after a failed step.
    pub(super) fn drop_gradients(&mut self) {
        self.pending = None;
    }
}
