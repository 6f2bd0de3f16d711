//! [`Verifier`]: repeats a step that is suspicious ([`crate::verification`]).
//!
//! The ranks of a suspicious step fail before any of them updates, as at any failure of a step, and drop their
//! gradients. So the pipeline can compute all batches of the step again, in every process alike.

use super::error::PipelineError;
use super::step_failure::StepFailure;
use super::step_plan::CheckedBatch;
use super::summary::StepSummary;
use crate::executor::StepVerification;
use crate::failure::{Cause, StepError};
use crate::verification::{
    Content, Difference, JUMP, REPETITIONS, Suspicion, UsualNorm, Verification, Verify,
};

/// The batches of the step that runs, and how often it was computed before.
pub(super) struct Verifier {
    verify: Verify,
    usual: UsualNorm,
    /// The batches of the step that runs. A clone shares its storage with the batch that the ranks get.
    batches: Vec<CheckedBatch>,
    /// The number of these batches that the computation has begun.
    begun: usize,
    /// The number of computations of the step before this one. The update ends the step: until then the
    /// gradients are on the ranks of this repetition.
    repetition: u32,
    /// The number of the last repetition that is allowed. A batch that is confirmed raises it: each batch is
    /// repeated at most [`REPETITIONS`] times before its first summary.
    last_repetition: u32,
    /// Whether the batches that are computed have been computed before. After a repetition for an earlier batch,
    /// the next batch of the step has not.
    is_repeated: bool,
    /// Why the step is repeated; `None` if it is not, or if a summary has the reason.
    suspicion: Option<Suspicion>,
}

impl Verifier {
    pub(super) fn new(verify: Verify) -> Self {
        let (usual, batches) = (UsualNorm::default(), Vec::new());
        Self {
            verify,
            usual,
            batches,
            begun: 0,
            repetition: 0,
            last_repetition: REPETITIONS,
            is_repeated: false,
            suspicion: None,
        }
    }

    /// Keeps a batch for repetitions. `is_first` says that no gradients of earlier batches wait for an update.
    pub(super) fn keep(&mut self, batch: &CheckedBatch, is_first: bool) {
        if self.verify == Verify::OnSuspicion {
            if is_first {
                self.end_step();
            }
            self.batches.push(batch.clone());
            self.begun = self.batches.len();
            self.is_repeated = false;
        }
    }

    /// Returns how the next computation is verified; `None` if it is not. Repetitions have no largest norm: their
    /// bits are compared.
    pub(super) fn verification(&self) -> Option<StepVerification> {
        let (repetition, is_first) = (self.repetition, !self.is_repeated);
        let usual_norm = self.usual.median().filter(|_| is_first);
        let verification = StepVerification { repetition, is_first, usual_norm };
        (self.verify == Verify::OnSuspicion).then_some(verification)
    }

    /// Begins a repetition after this failure, and returns its first batch. Returns `None` if the failure is to be
    /// reported.
    pub(super) fn repeat(&mut self, error: &PipelineError) -> Option<CheckedBatch> {
        let repeats = self.repetition < self.last_repetition
            && match error {
                PipelineError::Step(StepError { cause: Cause::Suspicious { suspicion }, .. }) => {
                    self.suspicion.get_or_insert_with(|| suspicion.clone());
                    true
                }
                PipelineError::Step(StepError { cause: Cause::Unconfirmed { difference }, .. }) => {
                    difference.content != Content::Parameters
                }
                _ => false,
            };
        if !repeats {
            self.refuse();
            return None;
        }
        (self.repetition, self.begun, self.is_repeated) = (self.repetition + 1, 0, true);
        self.next_batch()
    }

    /// Drops the last batch, which was refused or has failed. It leaves the gradients of earlier ones.
    pub(super) fn refuse(&mut self) {
        self.batches.pop();
        self.begun = self.batches.len();
    }

    /// Returns the next batch of a repetition; `None` if all have run.
    pub(super) fn next_batch(&mut self) -> Option<CheckedBatch> {
        let next = self.batches.get(self.begun).cloned();
        self.begun += usize::from(next.is_some());
        next
    }

    /// Adds the result of the repetitions to the summary of a batch. `difference` is the first result that
    /// differs.
    pub(super) fn end_batch(&mut self, difference: Option<Difference>, summary: &mut StepSummary) {
        if self.begun < self.batches.len() {
            return;
        }
        self.last_repetition = self.repetition + REPETITIONS;
        let Some(suspicion) = self.suspicion.take() else { return };
        let is_reproduced = match suspicion {
            Suspicion::Jump { usual, .. } => summary.gradient_norm > JUMP * usual,
            // With a loss scale, the repetition skips its update.
            Suspicion::Gradient { .. } => summary.skipped,
            _ => false,
        };
        let repetitions = self.repetition;
        summary.verification = Some(Verification { suspicion, repetitions, difference, is_reproduced });
    }

    /// Adds the reason and the number of the repetitions to a failure that is reported.
    pub(super) fn describe(&mut self, failure: &mut StepFailure) {
        (failure.suspicion, failure.repetitions) = (self.suspicion.take(), self.repetition);
    }

    /// Notes an update with this gradient norm.
    pub(super) fn end_update(&mut self, norm: f64) {
        if self.verify == Verify::OnSuspicion {
            self.usual.observe(norm);
            self.end_step();
        }
    }

    /// Forgets the norms and the batches, before the state of another step is restored.
    pub(super) fn forget(&mut self) {
        self.usual.forget();
        self.end_step();
    }

    fn end_step(&mut self) {
        self.batches.clear();
        (self.begun, self.repetition, self.last_repetition) = (0, 0, REPETITIONS);
        (self.is_repeated, self.suspicion) = (false, None);
    }
}
