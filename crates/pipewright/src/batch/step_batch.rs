//! [`Batch`]: the inputs, targets and side inputs of a step, microbatch by microbatch.
//!
//! ```
//! use burn::tensor::{Device, Int, Tensor};
//! use pipewright::batch::Batch;
//!
//! let device = Device::flex();
//! let tokens = Tensor::<2, Int>::zeros([8, 16], &device);
//! let documents = Tensor::<2, Int>::zeros([8, 16], &device);
//! let batch = Batch::split(tokens.clone(), tokens, 4)?
//!     .with_split("documents", documents)?
//!     .with_value("temperature", 0.7f32);
//! assert_eq!(batch.microbatches(), 4);
//! # Ok::<(), pipewright::batch::SplitError>(())
//! ```

use std::any::Any;
use std::sync::Arc;

use super::side_inputs::{Side, SideInputs};
use crate::batch::{Nested, SplitError, SplitSpec, split, split_by, split_uneven};
use crate::tensor::{Boundary, Values, pack};

/// The data of one step, microbatch by microbatch.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub(crate) inputs: Vec<Values>,
    pub(crate) targets: Vec<Values>,
    pub(crate) side_inputs: SideInputs,
    pub(crate) keep_outputs: bool,
    /// The size of each microbatch along the dimension in which the inputs are split; empty if that is the rows.
    sizes: Vec<usize>,
}

impl Batch {
    /// Makes a batch of microbatches that are already split; their numbers of rows may differ. `targets` may be empty
    /// for an evaluation.
    pub fn new(inputs: Vec<Values>, targets: Vec<Values>) -> Self {
        Self { inputs, targets, ..Self::default() }
    }

    /// Splits a whole batch along dimension 0 into equal microbatches.
    ///
    /// # Errors
    /// As [`split`].
    pub fn split(
        inputs: impl Boundary,
        targets: impl Boundary,
        microbatches: u32,
    ) -> Result<Self, SplitError> {
        Ok(Self::new(split(&pack(inputs), microbatches)?, split(&pack(targets), microbatches)?))
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
        Ok(Self::new(split_uneven(&pack(inputs), microbatches)?, split_uneven(&pack(targets), microbatches)?))
    }

    /// Splits each tensor as its [`SplitSpec`] says; the specs have the nesting of the inputs and of the targets.
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
        let (inputs, mut specs) = (pack(inputs), Vec::new());
        input_specs.flatten(&mut specs);
        let first = specs.iter().enumerate().find_map(|(tensor, spec)| match *spec {
            SplitSpec::Along(dimension) => Some((tensor, dimension)),
            SplitSpec::Replicate => None,
        });
        let inputs = split_by(&inputs, specs, microbatches)?;
        let size = |values: &Values| first.map_or(1, |(tensor, dimension)| values[tensor].shape()[dimension]);
        let sizes = inputs.iter().map(size).collect();
        let targets = split_by(&pack(targets), target_specs, microbatches)?;
        Ok(Self { inputs, targets, sizes, ..Self::default() })
    }

    /// Adds tensors that every stage may read, split as the inputs are.
    ///
    /// # Errors
    /// As [`split_uneven`], and when a microbatch has another number of rows than the inputs.
    pub fn with_split(mut self, name: &str, tensors: impl Boundary) -> Result<Self, SplitError> {
        let parts = split_uneven(&pack(tensors), self.inputs.len() as u32)?;
        for (part, expected) in parts.iter().zip(self.sizes()) {
            let rows = rows_of(part);
            if rows != expected {
                return Err(SplitError::RowsDiffer { tensor: 0, rows, expected });
            }
        }
        self.side_inputs.0.insert(name.into(), Side::Split(parts));
        Ok(self)
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

    /// Makes a training step return the last stage's outputs, as an evaluation does.
    pub fn keep_outputs(mut self) -> Self {
        self.keep_outputs = true;
        self
    }

    /// Returns the number of microbatches.
    pub fn microbatches(&self) -> usize {
        self.inputs.len()
    }

    fn sizes(&self) -> Vec<usize> {
        match self.sizes.is_empty() {
            true => self.inputs.iter().map(rows_of).collect(),
            false => self.sizes.clone(),
        }
    }

    /// Returns the weight of each microbatch in the loss, times the number of microbatches: its rows divided by the
    /// mean number of rows.
    pub(crate) fn loss_weights(&self) -> Vec<f64> {
        let rows: Vec<f64> = self.sizes().into_iter().map(|size| size as f64).collect();
        let mean = rows.iter().sum::<f64>() / rows.len().max(1) as f64;
        rows.iter().map(|rows| if *rows == mean { 1.0 } else { rows / mean }).collect()
    }
}

/// Returns the rows of a microbatch; 1 for a scalar or an empty list.
fn rows_of(microbatch: &Values) -> usize {
    microbatch.first().and_then(|value| value.shape().first().copied()).unwrap_or(1)
}
