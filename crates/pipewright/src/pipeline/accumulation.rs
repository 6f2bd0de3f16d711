//! The state that one training step leaves for the next one: gradients that wait for an update, and the loss
//! scale.

use super::error::PipelineError;
use super::summary::StepSummary;
use crate::batch::ReductionUnit;
use crate::executor::UndeferredParameter;
use crate::loss_scale::{LossScale, LossScaling};

/// The state that one training step leaves for the next one.
pub(super) struct Accumulation {
    /// The unit of the batches whose gradients wait for an update; `None` if no gradients wait.
    pending: Option<ReductionUnit>,
    /// The parameters that batches have reported since the last update ([`StepSummary::undeferred`]).
    undeferred: Vec<UndeferredParameter>,
    /// The loss scale of the next step; `None` if losses are not scaled.
    loss_scale: Option<LossScale>,
}

impl Accumulation {
    pub(super) fn new(loss_scale: Option<LossScale>) -> Self {
        Self { pending: None, undeferred: Vec::new(), loss_scale }
    }

    /// Returns whether gradients wait for an update.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Returns the loss scale of the next step; `None` if losses are not scaled.
    pub(super) fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scale
    }

    /// Returns the unit of a batch whose own unit is `own`. If gradients wait, it is the unit of their first
    /// batch.
    pub(super) fn unit(&self, own: ReductionUnit) -> Result<ReductionUnit, PipelineError> {
        match self.pending {
            Some(pending) if !pending.is_like(own) => Err(PipelineError::MixedReductions),
            pending => Ok(pending.unwrap_or(own)),
        }
    }

    /// Notes that the ranks have a batch. `pending` is the unit of the batches whose gradients wait after it;
    /// `None` after an update.
    pub(super) fn begin_batch(&mut self, pending: Option<ReductionUnit>) {
        self.pending = pending;
    }

    /// Adds the summary of a batch without an update. It gets the parameters of all batches that wait.
    pub(super) fn add(&mut self, summary: &mut StepSummary) {
        self.undeferred.append(&mut summary.undeferred);
        summary.undeferred.clone_from(&self.undeferred);
    }

    /// Adds the summary of a batch with an update.
    pub(super) fn update(&mut self, scaling: LossScaling, summary: &mut StepSummary) {
        self.undeferred.append(&mut summary.undeferred);
        summary.undeferred = std::mem::take(&mut self.undeferred);
        self.loss_scale = self.loss_scale.map(|scale| scale.after(summary.skipped, scaling));
    }

    /// Drops the gradients after a failed step.
    pub(super) fn drop_gradients(&mut self) {
        self.pending = None;
        self.undeferred.clear();
    }

    /// Continues with the loss scale of a checkpoint.
    pub(super) fn restore(&mut self, loss_scale: Option<LossScale>) {
        (self.pending, self.loss_scale) = (None, loss_scale);
    }
}
