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

use std::any::Any;
use std::sync::Arc;

use pipewright_schedule::StageIndex;

use super::agreement::has_tensors;
use super::input_gradients::WantedGradients;
use super::reduction::Reduction;
use super::side_inputs::{Side, SideInputs};
use super::split_spec::{by_rows, cut, flat};
use crate::batch::{Nested, SplitError, SplitSpec, split, split_by, split_uneven, tensor_split};
use crate::tensor::{Boundary, Value, Values, pack};

/// The name of the side input with the targets ([`Batch::with_targets_for_all`]).
pub const TARGETS: &str = "targets";

/// The data of one step, microbatch by microbatch.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub(crate) inputs: Vec<Values>,
    pub(crate) targets: Vec<Values>,
    pub(crate) side_inputs: SideInputs,
    /// Whether the step returns the outputs of the last stage.
    pub(crate) keep_outputs: bool,
    /// The stages whose outputs the step returns by stage.
    pub(crate) kept_stages: Vec<StageIndex>,
    /// How the losses of the microbatches make the loss of the step.
    pub(super) reduction: Reduction,
    /// The targets that do not count, if the reduction has a weight for each of the others.
    pub(super) ignored: Option<i64>,
    /// The inputs whose gradients the step returns.
    pub(super) wanted: WantedGradients,
    /// How each input is split; empty if all are split along dimension 0.
    pub(super) specs: Vec<SplitSpec>,
    /// The size of each microbatch along the dimension in which the inputs are split; empty if that is the rows.
    pub(super) sizes: Vec<usize>,
    /// The same of the targets.
    target_sizes: Vec<usize>,
    /// Whether a function of this module has split the inputs and the targets.
    pub(super) is_split: bool,
}

impl Batch {
    /// Makes a batch of microbatches that are already split; their numbers of rows may differ. `targets` may be empty
    /// for an evaluation.
    pub fn new(inputs: Vec<Values>, targets: Vec<Values>) -> Self {
        Self { inputs, targets, ..Self::default() }
    }

    /// Splits a whole batch along dimension 0 into equal microbatches. The inputs may be `()` in a process without the first
    /// stage, and the targets in one without the last stage.
    ///
    /// # Errors
    /// As [`split`], and when both are `()`.
    pub fn split(
        inputs: impl Boundary,
        targets: impl Boundary,
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        Self::split_rows(split, (pack(inputs), pack(targets)), microbatches)
    }

    /// Splits a batch whose rows do not divide evenly: the last microbatch is shorter. Each row has the same weight in
    /// the loss and the gradients of the step.
    ///
    /// # Errors
    /// As [`split_uneven`].
    pub fn split_uneven(
        inputs: impl Boundary,
        targets: impl Boundary,
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        Self::split_rows(split_uneven, (pack(inputs), pack(targets)), microbatches)
    }

    /// Splits each tensor as its [`SplitSpec`] says; the specs have the nesting of the inputs and of the targets. The
    /// targets may be `()`: for a loss that takes none, or for an evaluation without losses.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use pipewright::batch::Batch;
    /// use pipewright::batch::SplitSpec;
    ///
    /// let device = Device::flex();
    /// let (sound, table) = (Tensor::<3>::zeros([100, 8, 4], &device), Tensor::<2>::zeros([9, 4], &device));
    /// let labels = Tensor::<1, Int>::zeros([8], &device);
    /// let specs = (SplitSpec::Along(1), SplitSpec::Replicate);
    /// let batch = Batch::split_by((sound, table), specs, labels, SplitSpec::Along(0), 4)?;
    /// assert_eq!(batch.microbatches(), 4);
    /// # Ok::<(), pipewright::batch::SplitError>(())
    /// ```
    ///
    /// # Errors
    /// As [`split_by`].
    pub fn split_by(
        inputs: impl Boundary,
        input_specs: impl Nested<SplitSpec>,
        targets: impl Boundary,
        target_specs: impl Nested<SplitSpec>,
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        Self::split_with(split_by, (pack(inputs), input_specs), (pack(targets), target_specs), microbatches)
    }

    /// Splits a whole batch along dimension 0 into microbatches whose sizes differ by at most one row, as PyTorch does: 9
    /// rows in 4 microbatches are 3, 2, 2 and 2. Each row has the same weight in the loss and the gradients of the step.
    ///
    /// # Errors
    /// As [`tensor_split`].
    pub fn tensor_split(
        inputs: impl Boundary,
        targets: impl Boundary,
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        let split = |tensors: &[Value], microbatches| tensor_split(tensors, by_rows(tensors), microbatches);
        Self::split_rows(split, (pack(inputs), pack(targets)), microbatches)
    }

    /// Splits inputs and targets along dimension 0 with one of the functions that split. Each may be left out, but not both.
    fn split_rows(
        split: impl Fn(&[Value], u32) -> Result<Vec<Values>, SplitError>,
        (inputs, targets): (Values, Values),
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        if inputs.is_empty() && targets.is_empty() {
            return Err(SplitError::Empty);
        }
        let parts = |tensors: Values| {
            if tensors.is_empty() {
                Ok(vec![Values::new(); microbatches as usize])
            } else {
                split(&tensors, microbatches)
            }
        };
        Ok(Self::of_parts(parts(inputs)?, parts(targets)?))
    }

    /// Makes a batch of the parts of whole tensors, which were split along dimension 0.
    pub(crate) fn of_parts(inputs: Vec<Values>, targets: Vec<Values>) -> Self {
        Self { is_split: true, ..Self::new(inputs, targets) }
    }

    /// As [`Batch::split_by`], with the sizes of [`Batch::tensor_split`].
    ///
    /// # Errors
    /// As [`tensor_split`].
    pub fn tensor_split_by(
        inputs: impl Boundary,
        input_specs: impl Nested<SplitSpec>,
        targets: impl Boundary,
        target_specs: impl Nested<SplitSpec>,
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        Self::split_with(
            tensor_split,
            (pack(inputs), input_specs),
            (pack(targets), target_specs),
            microbatches,
        )
    }

    /// Splits inputs and targets by their specs with one of the functions that split.
    fn split_with(
        split: impl Fn(&[Value], Vec<SplitSpec>, u32) -> Result<Vec<Values>, SplitError>,
        (inputs, input_specs): (Values, impl Nested<SplitSpec>),
        (targets, target_specs): (Values, impl Nested<SplitSpec>),
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        let specs = flat(input_specs, inputs.len())?;
        let parts = split(&inputs, specs.clone(), microbatches)?;
        let target_specs = flat(target_specs, targets.len())?;
        let targets = split(&targets, target_specs.clone(), microbatches)?;
        let sizes = if parts.iter().all(Vec::is_empty) { Vec::new() } else { sizes_of(&parts, &specs) };
        let target_sizes = sizes_of(&targets, &target_specs);
        Ok(Self { sizes, target_sizes, specs, is_split: true, inputs: parts, targets, ..Self::default() })
    }

    /// Adds tensors that every stage may read, split along dimension 0 as the inputs are.
    ///
    /// # Errors
    /// As [`Batch::with_split_by`].
    pub fn with_split(self, name: &str, tensors: impl Boundary) -> Result<Self, SplitError> {
        let tensors = pack(tensors);
        self.with_cut(name, &tensors, by_rows(&tensors))
    }

    /// As [`Batch::with_split`], with a [`SplitSpec`] for each tensor, in the nesting of the tensors. Microbatches have the
    /// sizes of those of the inputs.
    ///
    /// # Errors
    /// When the number of specs is not that of the tensors, a tensor lacks the dimension, or it has another size than all
    /// microbatches of the inputs together.
    pub fn with_split_by(
        self,
        name: &str,
        tensors: impl Boundary,
        specs: impl Nested<SplitSpec>,
    ) -> Result<Self, SplitError> {
        self.with_cut(name, &pack(tensors), specs)
    }

    fn with_cut(
        mut self,
        name: &str,
        tensors: &Values,
        specs: impl Nested<SplitSpec>,
    ) -> Result<Self, SplitError> {
        let (specs, sizes) = (flat(specs, tensors.len())?, self.sizes());
        let expected: usize = sizes.iter().sum();
        for (tensor, (value, spec)) in tensors.iter().zip(&specs).enumerate() {
            let SplitSpec::Along(dimension) = *spec else { continue };
            let shape = value.shape().to_vec();
            let Some(&rows) = shape.get(dimension) else {
                return Err(SplitError::NoDimension { tensor, dimension, shape });
            };
            if rows != expected {
                let name = name.to_owned();
                return Err(SplitError::SideRows { name, tensor, shape, dimension, rows, expected });
            }
        }
        self.side_inputs.0.insert(name.into(), Side::Split(cut(tensors, &specs, &sizes)));
        Ok(self)
    }

    /// Adds tensors that every stage may read and that are already split: those of each microbatch, in order.
    ///
    /// # Errors
    /// When there is another number of them than of microbatches.
    pub fn with_parts<T: Boundary>(
        mut self,
        name: &str,
        parts: impl IntoIterator<Item = T>,
    ) -> Result<Self, SplitError> {
        let parts: Vec<Values> = parts.into_iter().map(pack).collect();
        let (found, expected) = (parts.len(), self.microbatches());
        // A process that has neither inputs nor targets does not know the number yet.
        if found != expected && expected > 0 {
            return Err(SplitError::SideParts { name: name.to_owned(), found, expected });
        }
        self.side_inputs.0.insert(name.into(), Side::Split(parts));
        Ok(self)
    }

    /// Makes the targets a side input that every stage may read, under the name [`TARGETS`]. Layers that compute a part of a
    /// model's output head look their targets up there. They must have been given already. Steps that run slices of
    /// microbatches leave the side input out.
    pub fn with_targets_for_all(mut self) -> Self {
        self.side_inputs.0.insert(TARGETS.into(), Side::Split(self.targets.clone()));
        self
    }

    /// Adds tensors that every stage may read, the same for every microbatch.
    pub fn with_replicated(mut self, name: &str, tensors: impl Boundary) -> Self {
        self.side_inputs.0.insert(name.into(), Side::Replicated(pack(tensors)));
        self
    }

    /// Adds a value that is not a tensor and that every stage may read.
    pub fn with_value<T: Any + Send + Sync>(mut self, name: &str, value: T) -> Self {
        self.side_inputs.0.insert(name.into(), Side::Value(Arc::new(value)));
        self
    }

    /// Makes a training step return the last stage's outputs, as an evaluation does. Pipelines of tensor ranks refuse it,
    /// because each rank has a part of these outputs.
    pub fn keep_outputs(mut self) -> Self {
        self.keep_outputs = true;
        self
    }

    /// Makes a training step or an evaluation return the outputs of these stages, by stage. For the last stage, see
    /// [`Batch::keep_outputs`].
    pub fn keep_outputs_of(mut self, stages: impl IntoIterator<Item = StageIndex>) -> Self {
        self.kept_stages.extend(stages);
        self
    }

    /// Returns the number of microbatches; 0 if the batch has neither inputs nor targets.
    pub fn microbatches(&self) -> usize {
        match self.inputs.len() {
            0 => self.targets.len().max(self.sizes.len()),
            count => count,
        }
    }

    /// Returns the rows of each microbatch: those of the inputs, or of the targets if there are no inputs.
    pub(super) fn sizes(&self) -> Vec<usize> {
        if !self.sizes.is_empty() {
            self.sizes.clone()
        } else if has_tensors(&self.inputs) {
            self.inputs.iter().map(rows_of).collect()
        } else {
            self.target_sizes()
        }
    }

    /// Returns the size of the targets of each microbatch.
    pub(super) fn target_sizes(&self) -> Vec<usize> {
        if self.target_sizes.is_empty() {
            self.targets.iter().map(rows_of).collect()
        } else {
            self.target_sizes.clone()
        }
    }
}

/// Returns the size of each microbatch along the first dimension in which a tensor is split; 1 if none is split.
fn sizes_of(parts: &[Values], specs: &[SplitSpec]) -> Vec<usize> {
    let first = specs.iter().enumerate().find_map(|(tensor, spec)| match *spec {
        SplitSpec::Along(dimension) => Some((tensor, dimension)),
        SplitSpec::Replicate => None,
    });
    let size = |values: &Values| first.map_or(1, |(tensor, dimension)| values[tensor].shape()[dimension]);
    parts.iter().map(size).collect()
}

/// Returns the rows of a microbatch; 1 for a scalar or an empty list.
fn rows_of(microbatch: &Values) -> usize {
    microbatch.first().and_then(|value| value.shape().first().copied()).unwrap_or(1)
}
