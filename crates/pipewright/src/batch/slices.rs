//! Cuts microbatches along their sequences, for schedules that run slices, and joins the outputs of the
//! slices.

use pipewright_schedule::Slices;

use super::merge::merge_along;
use super::reduction::counted_ids;
use super::split::SplitError;
use crate::tensor::Values;

/// The dimension of inputs, targets and outputs that is their sequence.
pub(super) const SEQUENCE: usize = 1;

/// Returns the slices of all microbatches. The slices of a microbatch are in order.
///
/// # Errors
/// When a tensor has no sequence, or one whose length the number of slices does not divide.
pub(super) fn cut(microbatches: &[Values], slices: Slices) -> Result<Vec<Values>, SplitError> {
    let count = slices.get() as usize;
    for (tensor, value) in microbatches.iter().flat_map(|values| values.iter().enumerate()) {
        let shape = value.shape().to_vec();
        if shape.get(SEQUENCE).is_none_or(|&length| length == 0 || !length.is_multiple_of(count)) {
            return Err(SplitError(format!(
                "the schedule cuts sequences into {count} slices, and tensor {tensor} has the shape {shape:?}: dimension 1 \
                 is the sequence, whose length must be a multiple of {count}"
            )));
        }
    }
    let slice = |values: &Values, index: usize| {
        let slices = values.iter().map(|value| {
            let length = value.shape()[SEQUENCE] / count;
            value.narrow(SEQUENCE, index * length, (index + 1) * length)
        });
        slices.collect()
    };
    let all = microbatches.iter().flat_map(|values| (0..count).map(move |index| (values, index)));
    Ok(all.map(|(values, index)| slice(values, index)).collect())
}

/// Returns the share of each slice in the targets of its microbatch that are not `ignored`; none counts if
/// all are ignored.
pub(super) fn shares(slices_of_targets: &[Values], ignored: i64, slices: Slices) -> Vec<f64> {
    let counts = slices_of_targets.iter().map(|targets| counted_ids(targets, ignored).unwrap_or(0.0));
    let counts: Vec<f64> = counts.collect();
    let shares = |counts: &[f64]| {
        let sum: f64 = counts.iter().sum();
        counts.iter().map(|count| if sum > 0.0 { count / sum } else { 0.0 }).collect::<Vec<_>>()
    };
    counts.chunks(slices.get() as usize).flat_map(shares).collect()
}

/// Joins the outputs of all slices of each microbatch.
pub(crate) fn joined_slices(outputs: Vec<Values>, slices: Slices) -> Result<Vec<Values>, SplitError> {
    if slices.is_one() {
        return Ok(outputs);
    }
    outputs.chunks(slices.get() as usize).map(|slices| merge_along(slices.to_vec(), SEQUENCE)).collect()
}
