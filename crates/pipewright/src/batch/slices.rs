//! Cuts the microbatches of a batch along their sequences, for schedules that run slices.

use pipewright_schedule::Slices;

use super::agreement::has_tensors;
use super::reduction::{Reduction, valid};
use super::side_inputs::Side;
use crate::batch::{Batch, Merge, SplitError, TARGETS, merge_by};
use crate::tensor::{Value, ValueKind, Values};

/// The dimension of inputs, targets and outputs that is their sequence.
pub(super) const SEQUENCE: usize = 1;

impl Batch {
    /// Cuts the inputs and the targets of each microbatch into slices of equal length, in order. Returns the share of each
    /// slice in the loss of its microbatch: that of its tokens among those over which the loss is a mean. The side input
    /// [`TARGETS`] is dropped.
    ///
    /// # Errors
    /// When a tensor has no sequence, or one whose length the number of slices does not divide; when the batch has side
    /// inputs, or weights of microbatches that say nothing of their slices.
    pub(crate) fn cut_into(&mut self, slices: Slices) -> Result<Vec<f64>, SplitError> {
        if slices.is_one() {
            return Ok(vec![1.0; self.microbatches()]);
        }
        // A trainer adds the targets to every batch. The layers that look them up refuse slices.
        self.side_inputs.0.remove(TARGETS);
        let is_tensor = |side: &Side| !matches!(side, Side::Value(_));
        if let Some((name, _)) = self.side_inputs.0.iter().find(|(_, side)| is_tensor(side)) {
            return Err(SplitError::SliceSide { name: name.to_string() });
        }
        if self.ignored.is_none() && matches!(self.reduction, Reduction::Weights(_)) {
            return Err(SplitError::SliceWeights);
        }
        let (microbatches, count) = (self.microbatches(), slices.get() as usize);
        self.inputs = all_slices(&self.inputs, slices)?;
        let targets = all_slices(&self.targets, slices)?;
        let shares = match self.ignored {
            Some(ignored) if has_tensors(&targets) => {
                let counts = targets.iter().map(|target| counted(target, ignored)).collect::<Vec<_>>();
                counts.chunks(count).flat_map(shares_of).collect()
            }
            // A process without targets does not need them.
            _ => vec![1.0 / count as f64; microbatches * count],
        };
        self.targets = targets;
        Ok(shares)
    }
}

/// Returns the share of each count in their sum; none counts if all are 0.
fn shares_of(counts: &[f64]) -> Vec<f64> {
    let sum: f64 = counts.iter().sum();
    counts.iter().map(|count| if sum > 0.0 { count / sum } else { 0.0 }).collect()
}

fn counted(target: &Values, ignored: i64) -> f64 {
    let ids = target.iter().find(|value| value.kind() == ValueKind::Int);
    ids.map_or(0.0, |ids| valid(ids.clone(), ignored))
}

/// Returns the slices of all microbatches, those of each microbatch in order.
fn all_slices(microbatches: &[Values], slices: Slices) -> Result<Vec<Values>, SplitError> {
    let count = slices.get() as usize;
    for (tensor, value) in microbatches.iter().flat_map(|values| values.iter().enumerate()) {
        let shape = value.shape().to_vec();
        if shape.get(SEQUENCE).is_none_or(|&length| length == 0 || !length.is_multiple_of(count)) {
            return Err(SplitError::SliceLength { tensor, shape, slices: slices.get() });
        }
    }
    let slice_of = |value: &Value, slice: usize| {
        let length = value.shape()[SEQUENCE] / count;
        value.narrow(SEQUENCE, slice * length, (slice + 1) * length)
    };
    let of_slice = |values: &Values, slice| values.iter().map(|value| slice_of(value, slice)).collect();
    let all = microbatches.iter().flat_map(|values| (0..count).map(move |slice| (values, slice)));
    Ok(all.map(|(values, slice)| of_slice(values, slice)).collect())
}

/// Joins the outputs of all slices of each microbatch.
pub(crate) fn joined_slices(outputs: Vec<Values>, slices: Slices) -> Result<Vec<Values>, SplitError> {
    if slices.is_one() {
        return Ok(outputs);
    }
    let join = |outputs: &[Values]| {
        let specs = vec![Merge::Along(SEQUENCE); outputs.first().map_or(0, Vec::len)];
        Ok(merge_by(outputs.to_vec(), specs)?.concat())
    };
    outputs.chunks(slices.get() as usize).map(join).collect()
}
