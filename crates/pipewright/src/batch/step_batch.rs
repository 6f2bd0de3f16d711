//! [`Batch`]: the inputs, targets and side inputs of a step, microbatch by microbatch.
//!
//! ```
//! use burn::tensor::{Device, Int, Tensor};
//! use pipewright::batch::{Batch, SplitSpec};
//!
//! let device = Device::flex();
//! let tokens = Tensor::<2, Int>::zeros([8, 16], &device);
//! let documents = Tensor::<2, Int>::zeros([8, 16], &device);
//! let mask = Tensor::<3>::ones([16, 8, 16], &device);
//! let batch = Batch::split(tokens.clone(), tokens, 4)?
//!     .with_split("documents", documents)?
//!     .with_split_by("mask", mask, SplitSpec::Along(1))?
//!     .with_value("temperature", 0.7f32);
//! assert_eq!(batch.microbatches(), 4);
//! # Ok::<(), pipewright::batch::SplitError>(())
//! ```

use std::sync::Arc;

use burn::tensor::Tensor;
use pipewright_schedule::{Slices, StageIndex};

use super::agreement::{AgreedBatch, Purpose, StepForm};
use super::input_gradients::{InputGradients, SideGradients, WantedGradients};
use super::reduction::{LossFactors, Reduction, ReductionUnit};
use super::side_inputs::{Side, SideInputs};
use super::slices;
use super::split::{SplitError, SplitRule, SplitSpec, no_tensor, sizes_of};
use crate::tensor::{Boundary, Value, Values, pack};

/// The name of the side input with the targets ([`Batch::with_targets_for_all`]).
pub const TARGETS: &str = "targets";

/// The data of one step, microbatch by microbatch.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    inputs: Vec<Values>,
    targets: Vec<Values>,
    side_inputs: SideInputs,
    /// The outputs that the step returns.
    pub(crate) kept: KeptOutputs,
    /// The inputs whose gradients the step returns.
    wanted: WantedGradients,
    /// How the losses of the microbatches make the loss of the step.
    reduction: Reduction,
    /// The size of each microbatch of the inputs, or of the targets if there are no inputs.
    pub(super) sizes: Vec<usize>,
    /// The size of the targets of each microbatch.
    target_sizes: Vec<usize>,
    /// How each input is split; empty if the caller has split the inputs.
    specs: Vec<SplitSpec>,
    /// Whether inputs and targets are parts of whole tensors, which [`Batch::split`] has split.
    is_split: bool,
}

/// The outputs that a step returns.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptOutputs {
    /// Whether the step returns the outputs of the last stage.
    pub last: bool,
    /// The stages whose outputs the step returns by stage.
    pub stages: Arc<[StageIndex]>,
}

/// The part of a batch that cannot be split.
#[derive(Debug)]
pub(crate) struct UnsplitPart {
    /// Inputs or targets.
    pub what: &'static str,
    pub source: SplitError,
}

/// The tensors of a batch, which a step gives to the ranks.
pub(crate) struct BatchTensors {
    pub inputs: Vec<Values>,
    pub targets: Vec<Values>,
    pub side_inputs: SideInputs,
}

impl Batch {
    /// Makes a batch of microbatches that are already split; their numbers of rows may differ. `targets` may
    /// be empty for an evaluation.
    pub fn new(inputs: Vec<Values>, targets: Vec<Values>) -> Self {
        let sizes = |microbatches: &[Values]| microbatches.iter().map(rows_of).collect();
        let (input_sizes, target_sizes) = (sizes(&inputs), sizes(&targets));
        Self { is_split: false, ..Self::of_parts(inputs, input_sizes, targets, target_sizes) }
    }

    /// Splits a whole batch into microbatches. The rule is their number, which must divide the rows, or a
    /// [`SplitRule`] for other sizes or dimensions. Each row has the same weight in the loss and the
    /// gradients of the step.
    ///
    /// The inputs may be `()` in a process without the first stage. The targets may be `()` in a process
    /// without the last stage, for a loss that takes none, and for an evaluation without losses.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use pipewright::batch::{Batch, SplitRule, SplitSpec};
    ///
    /// let device = Device::flex();
    /// let (sound, table) = (Tensor::<3>::zeros([100, 9, 4], &device), Tensor::<2>::zeros([9, 4], &device));
    /// let labels = Tensor::<1, Int>::zeros([9], &device);
    /// // 9 rows in 4 microbatches are 3, 2, 2 and 2.
    /// let rule = SplitRule::balanced(4).inputs((SplitSpec::Along(1), SplitSpec::Replicate));
    /// let batch = Batch::split((sound, table), labels, rule)?;
    /// assert_eq!(batch.microbatches(), 4);
    /// # Ok::<(), pipewright::batch::SplitError>(())
    /// ```
    ///
    /// # Errors
    /// As [`split`](super::split()), and when inputs and targets are both `()`.
    pub fn split(
        inputs: impl Boundary,
        targets: impl Boundary,
        rule: impl Into<SplitRule>,
    ) -> Result<Self, SplitError> {
        let (inputs, targets) = (pack(inputs), pack(targets));
        if inputs.is_empty() && targets.is_empty() {
            return Err(no_tensor());
        }
        Self::split_parts(&inputs, &targets, &rule.into()).map_err(|error| error.source)
    }

    /// Splits a whole batch. This process may have neither inputs nor targets.
    pub(crate) fn split_parts(
        inputs: &[Value],
        targets: &[Value],
        rule: &SplitRule,
    ) -> Result<Self, UnsplitPart> {
        let unsplit = |what| move |source| UnsplitPart { what, source };
        let (inputs, specs) = rule.split_inputs(inputs).map_err(unsplit("inputs"))?;
        let (targets, target_specs) = rule.split_targets(targets).map_err(unsplit("targets"))?;
        let (input_sizes, target_sizes) = (sizes_of(&inputs, &specs), sizes_of(&targets, &target_specs));
        Ok(Self { specs, ..Self::of_parts(inputs, input_sizes, targets, target_sizes) })
    }

    /// Leaves the targets out, so that an evaluation computes no loss.
    pub(crate) fn without_targets(mut self) -> Self {
        self.targets.clear();
        self
    }

    /// Makes a batch of microbatches that have these sizes.
    fn of_parts(
        inputs: Vec<Values>,
        input_sizes: Vec<usize>,
        targets: Vec<Values>,
        target_sizes: Vec<usize>,
    ) -> Self {
        let sizes =
            if has_tensors(&inputs) || targets.is_empty() { input_sizes } else { target_sizes.clone() };
        Self { inputs, targets, sizes, target_sizes, is_split: true, ..Self::default() }
    }

    /// Makes the targets a side input that every stage may read, under the name [`TARGETS`]. Layers that
    /// compute a part of a model's output head look their targets up there. They must have been given
    /// already. With
    /// [`PipelineConfig::targets_for_all`](crate::pipeline::PipelineConfig::targets_for_all), every batch has this side
    /// input. A schedule that cuts microbatches into slices cannot have it.
    pub fn with_targets_for_all(self) -> Self {
        let targets = Side::Split(self.targets.clone(), Vec::new());
        self.with_side(TARGETS, targets)
    }

    /// Adds a side input.
    pub(super) fn with_side(mut self, name: &str, side: Side) -> Self {
        self.side_inputs.insert(name, side);
        self
    }

    /// Makes a training step return the last stage's outputs, as an evaluation does.
    pub fn keep_outputs(mut self) -> Self {
        self.kept.last = true;
        self
    }

    /// Makes a training step or an evaluation return the outputs of these stages, by stage.
    pub fn keep_outputs_of(mut self, stages: impl IntoIterator<Item = StageIndex>) -> Self {
        self.kept.stages = self.kept.stages.iter().copied().chain(stages).collect();
        self
    }

    /// Makes a training step return the gradients of all float inputs
    /// ([`StepSummary::input_gradients`](crate::pipeline::StepSummary::input_gradients)), for example to
    /// train a model whose outputs are these inputs.
    ///
    /// ```
    /// # use burn::tensor::{Device, Tensor};
    /// # use pipewright::batch::Batch;
    /// # use pipewright::pipeline::{Pipeline, PipelineError};
    /// /// Trains on the outputs of an encoder, and returns a scalar whose backward continues into the encoder.
    /// fn step(pipeline: &mut Pipeline, hidden: Tensor<2>, target: Tensor<2>) -> Result<Tensor<1>, Box<dyn std::error::Error>> {
    ///     let batch = Batch::split(hidden.clone(), target, 4)?.keep_input_gradients();
    ///     let summary = pipeline.step_batch(batch, 1e-3)?;
    ///     let gradient = summary.input_gradient::<2>(0)?;
    ///     Ok((hidden * gradient.autodiff()).sum())
    /// }
    /// ```
    pub fn keep_input_gradients(mut self) -> Self {
        self.wanted = WantedGradients::All;
        self
    }

    /// Like [`Batch::keep_input_gradients`], for the inputs with these numbers, in the order in which the
    /// first stage takes them. They must be float tensors.
    pub fn keep_input_gradients_of(mut self, inputs: impl IntoIterator<Item = usize>) -> Self {
        self.wanted = WantedGradients::Of(inputs.into_iter().collect());
        self
    }

    /// Sets the weight of each microbatch in the loss of the step: usually the number of tokens over which
    /// its loss is a mean. The loss of the step is then the mean over all tokens of the batch, and of all
    /// batches whose gradients are accumulated. Without weights each microbatch counts by its rows, and a
    /// token of a microbatch with few valid tokens counts more than others.
    ///
    /// ```
    /// # use burn::tensor::{Device, Tensor};
    /// # use pipewright::batch::Batch;
    /// # let x = Tensor::<2>::zeros([4, 8], &Device::flex());
    /// let batch = Batch::split(x.clone(), x, 2)?.weighted([31.0, 7.0])?;
    /// # Ok::<(), pipewright::batch::SplitError>(())
    /// ```
    ///
    /// # Errors
    /// When there is another number of weights than of microbatches, one is negative or not finite, or all
    /// are 0.
    pub fn weighted(mut self, weights: impl Into<Vec<f64>>) -> Result<Self, SplitError> {
        self.reduction = Reduction::by_weights(weights.into(), self.known_count())?;
        Ok(self)
    }

    /// Sets the weight of each microbatch to the number of its targets that are not `ignored`: the ids of the
    /// first integer tensor ([`Batch::weighted`]). The loss must be the mean over the same tokens, and 0 if
    /// there are none ([`weighted_cross_entropy`](crate::nn::weighted_cross_entropy)).
    ///
    /// # Errors
    /// When the targets have no integer tensor, or all are ignored.
    pub fn ignoring(mut self, ignored: i64) -> Result<Self, SplitError> {
        self.reduction = Reduction::by_ids(&self.targets, ignored, self.known_count())?;
        Ok(self)
    }

    /// Adds the weights of tokens as the side input `name`, split along dimension 0, and sets the weight of
    /// each microbatch to their sum ([`Batch::weighted`]). The loss must be the mean weighted by them.
    ///
    /// # Errors
    /// As [`Batch::with_split`] and [`Batch::weighted`].
    pub fn with_token_weights<const D: usize>(
        self,
        name: &str,
        weights: Tensor<D>,
    ) -> Result<Self, SplitError> {
        let batch = self.with_split(name, weights.clone())?;
        let mut start = 0;
        let sums = batch.sizes.iter().map(|&size| {
            let part = weights.clone().narrow(0, start, size);
            start += size;
            part.sum().into_data().iter::<f64>().sum()
        });
        let sums: Vec<f64> = sums.collect();
        batch.weighted(sums)
    }

    /// Makes the loss of the step the sum of the losses of the microbatches, as PyTorch's `scale_grads=False`
    /// does: the gradients are the gradients of the sum. Gradients of accumulated batches are added.
    pub fn summed(mut self) -> Self {
        self.reduction = Reduction::Sum;
        self
    }

    /// Returns the number of microbatches; 0 if the batch has neither inputs nor targets.
    pub fn microbatches(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the number of microbatches. A process that has neither inputs nor targets does not know it
    /// yet.
    pub(super) fn known_count(&self) -> Option<usize> {
        Some(self.microbatches()).filter(|&count| count > 0)
    }

    /// Returns the numbers of microbatches of the inputs and of the targets. The batch must not be cut yet.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.inputs.len(), self.targets.len())
    }

    /// Returns the number of weights that the batch was given; `None` if it was given none.
    pub(crate) fn weight_count(&self) -> Option<usize> {
        match &self.reduction {
            Reduction::Weights { weights, .. } => Some(weights.len()),
            Reduction::Rows | Reduction::Sum => None,
        }
    }

    /// Returns what batches that are accumulated with this one must have in common with it.
    pub(crate) fn unit(&self) -> ReductionUnit {
        self.reduction.unit(&self.sizes)
    }

    /// Returns the factors of the losses. `unit` is the unit of the weights of the batches that are
    /// accumulated with this one; by default it is the batch's own.
    pub(crate) fn loss_factors(&self, unit: Option<f64>) -> LossFactors {
        self.reduction.factors(&self.sizes, unit)
    }

    /// Returns whether the batch asks for any gradient of its inputs.
    pub(crate) fn wants_gradients(&self) -> bool {
        self.wanted != WantedGradients::None
    }

    /// Returns how the gradients that the batch asks for are joined.
    ///
    /// # Errors
    /// When the batch asks for gradients that do not exist or cannot be joined, or has tensors that require a
    /// gradient that it does not ask for.
    pub(crate) fn input_gradients(&self) -> Result<InputGradients, SplitError> {
        let gradients = InputGradients::new(&self.wanted, &self.inputs, &self.specs)?;
        if self.targets.iter().flatten().any(Value::is_tracked) {
            let reason = "a target requires a gradient, and a pipeline computes the gradients of its parameters, its inputs \
                          and its side inputs: make it one of these, or pass `tensor.inner()`";
            return Err(SplitError(reason.to_owned()));
        }
        Ok(gradients)
    }

    /// Returns how the gradients of the side inputs that require one are joined.
    ///
    /// # Errors
    /// When the parts of one cannot be joined.
    pub(crate) fn side_gradients(&self) -> Result<SideGradients, SplitError> {
        self.side_inputs.gradients()
    }

    /// Returns the form of the batch, which the processes compare. The batch may be cut.
    pub(crate) fn form(&self, purpose: Purpose) -> StepForm {
        let inputs = has_tensors(&self.inputs).then_some(&*self.sizes);
        let targets = has_tensors(&self.targets).then_some(&*self.target_sizes);
        StepForm::new(purpose, [inputs, targets], self.is_split, &self.reduction)
    }

    /// Takes what all processes agree on; the batch has `count` microbatches.
    pub(crate) fn adopt(&mut self, agreed: AgreedBatch, count: usize) {
        let AgreedBatch { sizes, reduction } = agreed;
        self.sizes = match sizes {
            Some(sizes) => sizes.into_iter().map(|size| size as usize).collect(),
            None => vec![1; count],
        };
        self.reduction = reduction.unwrap_or_else(|| self.reduction.clone());
    }

    /// Cuts the inputs and the targets of each microbatch into slices of equal length, in order.
    ///
    /// # Errors
    /// When a tensor has no sequence, or one whose length the number of slices does not divide; when the
    /// batch has side inputs, or weights of microbatches that say nothing of their slices.
    pub(crate) fn cut_into(mut self, slices: Slices) -> Result<Self, SplitError> {
        if slices.is_one() {
            return Ok(self);
        }
        if let Some(name) = self.side_inputs.any_tensors() {
            return Err(SplitError(format!(
                "the schedule cuts sequences into slices, and the tensors of side input `{name}` are not cut: leave it out, or \
                 use a schedule of whole microbatches, such as `1f1b`"
            )));
        }
        if matches!(self.reduction, Reduction::Weights { ignored: None, .. }) {
            let reason = "the schedule cuts sequences into slices, and the weights of the microbatches do not say how much \
                          each slice counts: use `Batch::ignoring`, or a schedule of whole microbatches, such as `1f1b`";
            return Err(SplitError(reason.to_owned()));
        }
        self.inputs = slices::cut(&self.inputs, slices)?;
        self.targets = slices::cut(&self.targets, slices)?;
        Ok(self)
    }

    /// Returns the share of each slice in the loss of its microbatch: its share in the tokens over which the
    /// loss is a mean. The batch must be cut.
    pub(crate) fn slice_shares(&self, slices: Slices) -> Vec<f64> {
        if slices.is_one() {
            return vec![1.0; self.microbatches()];
        }
        match self.reduction {
            Reduction::Weights { ignored: Some(ignored), .. } if has_tensors(&self.targets) => {
                slices::shares(&self.targets, ignored, slices)
            }
            // A process without targets does not need them.
            _ => vec![1.0 / f64::from(slices.get()); self.microbatches() * slices.get() as usize],
        }
    }

    /// Returns the tensors.
    pub(crate) fn into_tensors(self) -> BatchTensors {
        let Self { inputs, targets, side_inputs, .. } = self;
        BatchTensors { inputs, targets, side_inputs }
    }
}

/// Returns whether any microbatch has a tensor.
fn has_tensors(microbatches: &[Values]) -> bool {
    microbatches.iter().any(|values| !values.is_empty())
}

/// Returns the rows of a microbatch; 1 for a scalar or an empty list.
fn rows_of(microbatch: &Values) -> usize {
    microbatch.first().and_then(|value| value.shape().first().copied()).unwrap_or(1)
}
