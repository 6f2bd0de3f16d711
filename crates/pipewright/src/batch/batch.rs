//! What a step works on: the data of each microbatch, the targets of the loss, and what every stage may look at beside.
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
    /// What each microbatch has along the dimension in which the inputs are split; the rows where this is empty.
    sizes: Vec<usize>,
}

impl Batch {
    /// Microbatches that are split already; they may differ in rows. `targets` may be empty for an evaluation.
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

    /// As [`Batch::split`], for rows that do not divide: the last microbatch is short. Each row counts the same for the
    /// loss and the gradients of the step.
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

    /// As [`Batch::split_uneven`], with a spec for each tensor of the inputs and of the targets, in their nesting.
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
    /// As [`split_uneven`], and when a part has other rows than the inputs.
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

    /// Adds a value that is no tensor, for every stage to read.
    pub fn with_value<T: Any + Send + Sync>(mut self, name: &str, value: T) -> Self {
        self.side_inputs.0.insert(name.into(), Side::Value(Arc::new(value)));
        self
    }

    /// Asks for the last stage's outputs in the report of a training step, as evaluations have them.
    pub fn keep_outputs(mut self) -> Self {
        self.keep_outputs = true;
        self
    }

    /// Microbatches of the inputs.
    pub fn microbatches(&self) -> usize {
        self.inputs.len()
    }

    fn sizes(&self) -> Vec<usize> {
        match self.sizes.is_empty() {
            true => self.inputs.iter().map(rows_of).collect(),
            false => self.sizes.clone(),
        }
    }

    /// What a microbatch counts for, times the number of microbatches: its rows over the mean of all.
    pub(crate) fn loss_weights(&self) -> Vec<f64> {
        let rows: Vec<f64> = self.sizes().into_iter().map(|size| size as f64).collect();
        let mean = rows.iter().sum::<f64>() / rows.len().max(1) as f64;
        rows.iter().map(|rows| if *rows == mean { 1.0 } else { rows / mean }).collect()
    }
}

/// Rows of a microbatch; one of a scalar or of none.
fn rows_of(microbatch: &Values) -> usize {
    microbatch.first().and_then(|value| value.shape().first().copied()).unwrap_or(1)
}
