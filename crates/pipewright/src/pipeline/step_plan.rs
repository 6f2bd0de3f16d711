//! How a batch reaches the ranks: it is checked and cut into slices ([`CheckedBatch`]), the factors of its losses
//! are computed ([`StepPlan`]), and each rank gets its share ([`StepInput`]).

use std::sync::Arc;

use pipewright_schedule::StageIndex;
use pipewright_schedule::words::counted;

use super::error::{Mistake, PipelineError};
use super::setup::Setup;
use crate::batch::{
    AgreedBatch, Batch, BatchTensors, InputGradients, KeptOutputs, LossFactors, Purpose, ReductionUnit,
    SideGradients, SplitError, StepForm,
};
use crate::executor::{Follow, StepInput, StepOrigin, StepVerification};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::loss_scale::StepScale;
use crate::mesh::{MeshCoord, RankGroups};
use crate::tensor::Values;

/// A step and the attempt at it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepAttempt {
    pub step: StepNumber,
    pub attempt: Attempt,
}

impl StepAttempt {
    /// Returns the numbers of the next step.
    pub(super) fn next(self) -> Self {
        Self { step: self.step.next(), attempt: self.attempt.next() }
    }
}

/// A batch with which the ranks of this process can take a step, cut into slices.
#[derive(Clone)]
pub(super) struct CheckedBatch {
    batch: Batch,
    purpose: Purpose,
    input_gradients: InputGradients,
    side_gradients: SideGradients,
}

impl CheckedBatch {
    /// Checks and cuts a batch. `ranks` are the ranks of this process.
    pub(super) fn new(
        setup: &Setup,
        ranks: impl Iterator<Item = WorldRank>,
        batch: Batch,
        purpose: Purpose,
    ) -> Result<Self, PipelineError> {
        check_count(setup, ranks, &batch, purpose)?;
        check_outputs(setup, &batch.kept, purpose)?;
        let batch_error = |error: SplitError| PipelineError::Batch(Mistake::caused(error.to_string(), error));
        let (input_gradients, side_gradients) = match purpose {
            Purpose::Evaluate if batch.wants_gradients() => {
                let reason = "the batch asks for gradients of its inputs, and an evaluation computes none: take a training step";
                return Err(PipelineError::batch(reason));
            }
            Purpose::Evaluate => (InputGradients::default(), SideGradients::default()),
            Purpose::Update { .. } | Purpose::Accumulate => {
                let sides = batch.side_gradients().map_err(batch_error)?;
                (batch.input_gradients().map_err(batch_error)?, sides)
            }
        };
        check_sides(setup, &side_gradients)?;
        let batch = if setup.config.targets_for_all { batch.with_targets_for_all() } else { batch };
        let batch = batch.cut_into(setup.slices()).map_err(PipelineError::slices)?;
        Ok(Self { batch, purpose, input_gradients, side_gradients })
    }

    /// Returns the batch as one that ends its step.
    pub(super) fn ending_step(self) -> Self {
        Self { purpose: Purpose::Update { learning_rate: 0.0 }, ..self }
    }

    /// Returns what this process says of the batch.
    pub(super) fn form(&self) -> StepForm {
        self.batch.form(self.purpose)
    }

    /// Takes what all processes agree on.
    pub(super) fn adopt(&mut self, setup: &Setup, agreed: AgreedBatch) {
        self.batch.adopt(agreed, setup.microbatches_for(self.purpose) as usize);
    }

    /// Returns what batches that are accumulated with this one must have in common with it.
    pub(super) fn unit(&self) -> ReductionUnit {
        self.batch.unit()
    }
}

/// A step before it runs: what its ranks and its summary need to know, without its tensors.
pub(super) struct StepPlan {
    pub(super) at: StepAttempt,
    purpose: Purpose,
    factors: LossFactors,
    scale: StepScale,
    /// The scale of the losses, which is known when the steps before have ended; `None` if losses are not scaled.
    pub(super) loss_scale: Option<f64>,
    /// How the gradients of the inputs are joined.
    pub(super) input_gradients: InputGradients,
    /// How the gradients of side inputs are joined.
    pub(super) side_gradients: SideGradients,
    /// `None` in an evaluation, and if steps are not verified.
    verification: Option<StepVerification>,
    /// Whether the step is computed again to find the first value that is not finite.
    searches: bool,
}

impl StepPlan {
    /// Plans a training step. `unit` is the unit of the batches that are accumulated.
    pub(super) fn training(
        at: StepAttempt,
        batch: &CheckedBatch,
        unit: ReductionUnit,
        scale: StepScale,
        verification: Option<StepVerification>,
    ) -> Self {
        let factors = batch.batch.loss_factors(unit.weight);
        Self {
            at,
            purpose: batch.purpose,
            factors,
            scale,
            loss_scale: None,
            input_gradients: batch.input_gradients.clone(),
            side_gradients: batch.side_gradients.clone(),
            verification,
            searches: false,
        }
    }

    /// Lets the step check the values of the layers, and end without an update.
    pub(super) fn searching(self) -> Self {
        Self { searches: true, ..self }
    }

    /// Notes the scale of the losses of a training step, by which the gradients in the results are divided.
    pub(super) fn scaled(self, loss_scale: Option<f64>) -> Self {
        let divisor = if self.factors.is_sum { 1.0 } else { self.factors.divisor };
        let factor = 1.0 / divisor / loss_scale.unwrap_or(1.0);
        Self {
            loss_scale,
            input_gradients: self.input_gradients.times(factor),
            side_gradients: self.side_gradients.times(factor),
            ..self
        }
    }

    /// Plans an evaluation.
    pub(super) fn evaluation(at: StepAttempt, batch: &CheckedBatch) -> Self {
        Self {
            at,
            purpose: Purpose::Evaluate,
            factors: batch.batch.loss_factors(None),
            scale: StepScale::default(),
            loss_scale: None,
            input_gradients: InputGradients::default(),
            side_gradients: SideGradients::default(),
            verification: None,
            searches: false,
        }
    }

    /// Returns the last step before this one.
    pub(super) fn done(&self) -> StepNumber {
        self.at.step.previous()
    }

    /// Returns the last step after this one, whether it fails or not. Only an update ends a step: random
    /// numbers depend on the step, and a resumed run must draw the same ones.
    pub(super) fn last_step(&self) -> StepNumber {
        if self.updates() { self.at.step } else { self.done() }
    }

    /// Returns whether the step ends with an update.
    pub(super) fn updates(&self) -> bool {
        matches!(self.purpose, Purpose::Update { .. })
    }

    /// Returns whether the next step may begin before this one updates: it needs nothing of this one's results.
    pub(super) fn may_overlap(&self) -> bool {
        let needs_results = self.verification.is_some() || self.searches;
        self.updates() && !needs_results && !self.returns_gradients()
    }

    /// Returns whether the results have gradients of inputs or side inputs.
    pub(super) fn returns_gradients(&self) -> bool {
        self.input_gradients.wanted().contains(&true) || self.side_gradients.any().is_some()
    }

    /// Returns the number of computations of the step before this one.
    pub(super) fn repetition(&self) -> u32 {
        self.verification.map_or(0, |verification| verification.repetition)
    }

    /// Returns the factors of the losses.
    pub(super) fn into_factors(self) -> LossFactors {
        self.factors
    }

    /// Returns the input of each of `ranks`, in their order. Each replica gets its share of the microbatches:
    /// the rank of the first stage gets the inputs, and the rank of the last stage gets the targets. In a
    /// repetition of a step, it gets the share of another replica.
    pub(super) fn inputs_of(
        &self,
        setup: &Setup,
        ranks: impl Iterator<Item = WorldRank>,
        batch: CheckedBatch,
        (origin, follow): (&StepOrigin, Option<&Follow>),
    ) -> Vec<StepInput> {
        let program = setup.program_for(self.purpose);
        setup.board.set_program(program);
        let LossFactors { losses, divisor, is_sum, .. } = &self.factors;
        let slices = program.slices().get() as usize;
        let (slice_shares, kept) = (batch.batch.slice_shares(program.slices()), batch.batch.kept.clone());
        let losses: Vec<f64> = (0..slice_shares.len()).map(|number| losses[number / slices]).collect();
        let BatchTensors { mut inputs, mut targets, side_inputs } = batch.batch.into_tensors();
        let placement = program.placement();
        let first = placement.rank_of(placement.first_stage());
        let last = placement.rank_of(placement.last_stage());
        let share = program.microbatches() as usize;
        let learning_rate = match self.purpose {
            Purpose::Update { learning_rate } => learning_rate,
            Purpose::Accumulate | Purpose::Evaluate => 0.0,
        };
        let input = |world_rank| {
            let MeshCoord { replica, rank, tensor } = setup.mesh.coord(world_rank);
            // The last rank of a tensor group takes the tensors, and the others take copies.
            let take = if tensor + 1 == setup.mesh.tensor { take_all } else { copy_all };
            let own = setup.mesh.share_of(replica, self.repetition());
            let range = own as usize * share..(own as usize + 1) * share;
            let part = |batch: &mut Vec<Values>| batch.get_mut(range.clone()).map(take).unwrap_or_default();
            StepInput {
                step: self.at.step,
                attempt: self.at.attempt,
                share: own,
                verification: self.verification,
                searches: self.searches,
                inputs: if rank == first { part(&mut inputs) } else { Vec::new() },
                wanted_gradients: self.input_gradients.wanted(),
                targets: if rank == last { part(&mut targets) } else { Vec::new() },
                side_inputs: Arc::new(side_inputs.part(range.start / slices..range.end / slices)),
                loss_weights: losses[range.clone()].into(),
                slice_shares: slice_shares[range].into(),
                divisor: *divisor,
                is_sum: *is_sum,
                loss_scale: self.scale.factor,
                loss_scale_if_skipped: self.scale.if_skipped,
                keep_outputs: kept.last,
                kept_stages: kept.stages.clone(),
                learning_rate,
                update: self.updates(),
                program: program.clone(),
                origin: origin.clone(),
                overlap: follow.and_then(|follow| setup.overlap_rule(rank, follow)),
            }
        };
        ranks.map(input).collect()
    }
}

/// Returns an error if a batch has another number of microbatches than a step. Only the processes with the
/// first and the last stage need inputs and targets.
fn check_count(
    setup: &Setup,
    ranks: impl Iterator<Item = WorldRank>,
    batch: &Batch,
    purpose: Purpose,
) -> Result<(), PipelineError> {
    let (placement, expected) = (setup.program.placement(), setup.microbatches_for(purpose));
    let [first, last] =
        [placement.first_stage(), placement.last_stage()].map(|stage| placement.rank_of(stage));
    let ranks: Vec<_> = ranks.map(|rank| setup.mesh.coord(rank).rank).collect();
    let (inputs, targets) = batch.counts();
    let needs_targets = purpose != Purpose::Evaluate && ranks.contains(&last);
    let differs = |what: &str, found: usize| {
        let found = counted(found, "microbatch");
        PipelineError::batch(format!("{found} of {what}, the program has {expected}"))
    };
    let counts = [("inputs", inputs, ranks.contains(&first)), ("targets", targets, needs_targets)];
    for (what, found, is_needed) in counts {
        if found != expected as usize && (is_needed || found > 0) {
            return Err(differs(what, found));
        }
    }
    // A batch that has neither inputs nor targets has not compared its weights with a number of microbatches.
    match batch.weight_count() {
        Some(found) if found != expected as usize => Err(differs("weights", found)),
        _ => Ok(()),
    }
}

/// Returns an error if a side input requires a gradient that a stage would not compute.
fn check_sides(setup: &Setup, gradients: &SideGradients) -> Result<(), PipelineError> {
    let trained = setup.program.as_program().trained();
    let mut stages = (0..setup.program.placement().stages()).map(StageIndex::new);
    match (gradients.any(), stages.find(|&stage| !trained.runs_backward(stage))) {
        (Some(name), Some(stage)) => Err(PipelineError::batch(format!(
            "side input `{name}` requires a gradient, and the program has no backward of stage {stage}, whose parameters are \
             frozen: pass `tensor.inner()`, or make the program without `TrainedStages`"
        ))),
        _ => Ok(()),
    }
}

/// Returns an error if a batch asks for outputs that do not exist.
fn check_outputs(setup: &Setup, kept: &KeptOutputs, purpose: Purpose) -> Result<(), PipelineError> {
    let stages = setup.program.placement().stages();
    if let Some(&stage) = kept.stages.iter().find(|stage| stage.get() >= stages) {
        let stages = counted(stages, "stage");
        return Err(PipelineError::batch(format!(
            "the outputs of stage {stage} are to be kept, and the program has {stages}: name stages that exist"
        )));
    }
    let keeps = kept.last || !kept.stages.is_empty();
    if keeps && purpose != Purpose::Evaluate && !setup.slices().is_one() {
        let reason = "a training step whose schedule cuts microbatches into slices returns no outputs: do not ask for \
                      outputs, or evaluate the batch";
        return Err(PipelineError::batch(reason));
    }
    Ok(())
}

fn take_all(microbatches: &mut [Values]) -> Vec<Values> {
    microbatches.iter_mut().map(std::mem::take).collect()
}

fn copy_all(microbatches: &mut [Values]) -> Vec<Values> {
    microbatches.to_vec()
}
