//! The side inputs of a batch. A step returns the gradients of those tensors that require one
//! ([`StepSummary::side_gradients`](crate::pipeline::StepSummary::side_gradients)).

use std::any::Any;
use std::sync::Arc;

use pipewright_schedule::words::counted;

use super::side_inputs::Side;
use super::split::{Nested, SplitError, SplitSpec, by_rows, check_count, cut, flat, size_along};
use super::step_batch::Batch;
use crate::tensor::{Boundary, Values, pack};

impl Batch {
    /// Adds tensors that every stage may read, split along dimension 0 as the inputs are.
    ///
    /// # Errors
    /// As [`Batch::with_split_by`].
    pub fn with_split(self, name: &str, tensors: impl Boundary) -> Result<Self, SplitError> {
        let tensors = pack(tensors);
        self.with_cut(name, &tensors, by_rows(&tensors))
    }

    /// Like [`Batch::with_split`], with a [`SplitSpec`] for each tensor, in the nesting of the tensors.
    /// Microbatches have the sizes of the microbatches of the inputs.
    ///
    /// # Errors
    /// When there are more or fewer specs than tensors, a tensor lacks the dimension, or it has another size
    /// than all microbatches of the inputs together.
    pub fn with_split_by(
        self,
        name: &str,
        tensors: impl Boundary,
        specs: impl Nested<SplitSpec>,
    ) -> Result<Self, SplitError> {
        self.with_cut(name, &pack(tensors), specs)
    }

    fn with_cut(
        self,
        name: &str,
        tensors: &Values,
        specs: impl Nested<SplitSpec>,
    ) -> Result<Self, SplitError> {
        let (specs, sizes) = (flat(specs), &self.sizes);
        check_count(&specs, tensors.len())?;
        let expected: usize = sizes.iter().sum();
        for (tensor, (value, spec)) in tensors.iter().zip(&specs).enumerate() {
            let SplitSpec::Along(dimension) = *spec else { continue };
            let rows = size_along(tensor, value, dimension)?;
            if rows != expected {
                let shape = value.shape().to_vec();
                return Err(SplitError(format!(
                    "side input `{name}`: tensor {tensor} of shape {shape:?} has {rows} rows in dimension {dimension}, and the \
                     inputs have {expected}: give a row for each of theirs, or `Batch::with_replicated`"
                )));
            }
        }
        let parts = cut(tensors, &specs, sizes);
        Ok(self.with_side(name, Side::Split(parts, specs)))
    }

    /// Adds tensors that every stage may read and that are already split: the tensors of each microbatch, in
    /// order.
    ///
    /// # Errors
    /// When there is another number of them than of microbatches.
    pub fn with_parts<T: Boundary>(
        self,
        name: &str,
        parts: impl IntoIterator<Item = T>,
    ) -> Result<Self, SplitError> {
        let parts: Vec<Values> = parts.into_iter().map(pack).collect();
        let found = parts.len();
        if let Some(expected) = self.known_count().filter(|&expected| expected != found) {
            let (found, expected) = (counted(found, "part"), counted(expected, "microbatch"));
            return Err(SplitError(format!(
                "side input `{name}` has {found}, and the batch has {expected}: give one for each"
            )));
        }
        Ok(self.with_side(name, Side::Split(parts, Vec::new())))
    }

    /// Adds tensors that every stage may read, the same for every microbatch.
    pub fn with_replicated(self, name: &str, tensors: impl Boundary) -> Self {
        self.with_side(name, Side::Replicated(pack(tensors)))
    }

    /// Adds a value that is not a tensor and that every stage may read.
    pub fn with_value<T: Any + Send + Sync>(self, name: &str, value: T) -> Self {
        self.with_side(name, Side::Value(Arc::new(value)))
    }
}
