//! The input of a rank's step: its share of the batch, the program that it runs, and how it updates.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pipewright_schedule::{StageIndex, ValidatedProgram};

use crate::batch::SideInputs;
use crate::ids::{Attempt, StepNumber};
use crate::tensor::Values;

/// How a step is verified ([`crate::verification`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepVerification {
    /// The number of computations of the step before this one.
    pub repetition: u32,
    /// Whether the batch is computed for the first time. In a step of several batches, earlier ones may have
    /// been repeated before.
    pub is_first: bool,
    /// The median of the last gradient norms; `None` if no norm is a jump.
    pub usual_norm: Option<f64>,
}

/// The time at which the timeline of a step starts, the same for all ranks of a process: when the first of
/// them begins the step. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepOrigin(Arc<OnceLock<Instant>>);

impl StepOrigin {
    /// Returns the time. It is the time of the first call.
    pub(crate) fn time(&self) -> Instant {
        *self.0.get_or_init(Instant::now)
    }
}

/// How a batch overlaps with the one after it, on one rank.
#[derive(Clone)]
pub(crate) struct OverlapRule {
    /// For each computation of the repeating row, whether it belongs to the next batch.
    pub(crate) row: Arc<[bool]>,
    /// Whether the row of any rank has computations of the next batch.
    pub(crate) is_mixed: bool,
    pub(crate) follow: Follow,
}

/// Whether the next batch follows a batch without a drain, the same on all ranks of the process. Clones are one decision. Between
/// processes, the gradient norms decide it ([`Norms`](super::norm::Norms)), and this decision is that none follows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Follow(Arc<OnceLock<bool>>);

impl Follow {
    /// Decides that the next batch follows, unless a rank has decided that none does.
    pub(crate) fn announce(&self) {
        self.0.get_or_init(|| true);
    }

    /// Returns whether the next batch follows. If it is not announced, none does.
    pub(crate) fn decide(&self) -> bool {
        *self.0.get_or_init(|| false)
    }
}

/// The input of a rank's step.
pub(crate) struct StepInput {
    /// Counted from 1.
    pub step: StepNumber,
    /// The pipeline's attempt at this step.
    pub attempt: Attempt,
    /// The share of the batch that this replica gets: its index, except in repetitions of a step.
    pub share: u32,
    /// How the step is verified; `None` in an evaluation, and if steps are not verified.
    pub verification: Option<StepVerification>,
    /// Whether the values of the layers are checked: the step has failed because a number is not finite, and is
    /// computed again to find the first one. It does not update.
    pub searches: bool,
    /// The first stage's input of each microbatch; empty on other ranks.
    pub inputs: Vec<Values>,
    /// Whether the step returns the gradient of each of these inputs.
    pub wanted_gradients: Arc<[bool]>,
    /// The last stage's targets of each microbatch; empty on other ranks.
    pub targets: Vec<Values>,
    /// Tensors that every stage may read, the same on all ranks.
    pub side_inputs: Arc<SideInputs>,
    /// The factor of the losses of each microbatch in their backward, for each of its slices.
    pub loss_weights: Arc<[f64]>,
    /// The share of each slice in the loss of its microbatch.
    pub slice_shares: Arc<[f64]>,
    /// The addition of the step to the divisor of the gradient sums, and the divisor of its auxiliary losses.
    pub divisor: f64,
    /// Whether gradient sums are not divided.
    pub is_sum: bool,
    /// The factor of all losses in their backward, by which the sums of gradients are divided.
    pub loss_scale: f64,
    /// The same if the rank has skipped the update of the step two before this one ([`StepScale`](crate::loss_scale::StepScale)).
    pub loss_scale_if_skipped: f64,
    /// Whether the report contains the last stage's outputs.
    pub keep_outputs: bool,
    /// The stages whose outputs the report contains by stage.
    pub kept_stages: Arc<[StageIndex]>,
    /// The optimizer's learning rate.
    pub learning_rate: f64,
    /// Whether the step ends with an update. If not, its gradients are kept, and the next step adds its own.
    pub update: bool,
    /// The pipeline's program, or its program of evaluations.
    pub program: Arc<ValidatedProgram>,
    /// The time at which the timeline starts.
    pub origin: StepOrigin,
    /// How the next step overlaps with this one; `None` if none does.
    pub overlap: Option<OverlapRule>,
}

impl StepInput {
    /// Returns whether the step is computed again.
    pub(crate) fn is_repetition(&self) -> bool {
        self.repetition() > 0
    }

    /// Returns the first microbatch of this replica, or the number of its first slice. Errors, reports and
    /// random numbers number microbatches over all replicas.
    pub(crate) fn first_microbatch(&self) -> u32 {
        self.share * self.program.microbatches()
    }

    /// Returns the number of computations of the step before this one.
    pub(crate) fn repetition(&self) -> u32 {
        self.verification.map_or(0, |verification| verification.repetition)
    }
}
