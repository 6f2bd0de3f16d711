//! How the outputs of the microbatches are joined.

use burn::tensor::Tensor;

use super::split::{Nested, SplitError, check_count, flat, size_along};
use crate::tensor::{Value, ValueKind, Values};

/// How an output's microbatches are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// Joined along a dimension.
    Along(usize),
    /// The mean of float tensors of one shape; each microbatch has the same weight.
    Mean,
    /// Not joined: a list in microbatch order.
    List,
}

impl Nested<Self> for Merge {
    fn flatten(self, into: &mut Vec<Self>) {
        into.push(self);
    }
}

/// Joins the outputs of all microbatches along dimension 0; the inverse of [`split`](super::split()).
///
/// # Errors
/// When the tensors of the microbatches differ in more than their number of rows.
pub fn merge(microbatches: Vec<Values>) -> Result<Values, SplitError> {
    merge_along(microbatches, 0)
}

/// Joins the outputs of all microbatches along a dimension.
pub(super) fn merge_along(microbatches: Vec<Values>, dimension: usize) -> Result<Values, SplitError> {
    let specs = vec![Merge::Along(dimension); microbatches.first().map_or(0, Vec::len)];
    Ok(merge_by(microbatches, specs)?.concat())
}

/// Joins the microbatches' outputs as the specs say. Each output becomes one tensor, or one per microbatch
/// with
/// [`Merge::List`].
///
/// # Errors
/// When there are more or fewer specs than outputs, or tensors that are joined do not match.
pub fn merge_by(microbatches: Vec<Values>, specs: impl Nested<Merge>) -> Result<Vec<Values>, SplitError> {
    let tensors = microbatches.first().map_or(0, Vec::len);
    let specs = flat(specs);
    check_count(&specs, tensors)?;
    let mut columns: Vec<Values> = vec![Values::new(); tensors];
    for (microbatch, values) in microbatches.into_iter().enumerate() {
        if values.len() != tensors {
            return Err(tensors_differ(microbatch, values.len(), tensors));
        }
        columns.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
    }
    let joined = columns.into_iter().zip(specs).enumerate();
    joined.map(|(tensor, (column, spec))| merge_one(tensor, column, spec)).collect()
}

fn merge_one(tensor: usize, column: Values, spec: Merge) -> Result<Values, SplitError> {
    let dimension = match spec {
        Merge::List => return Ok(column),
        Merge::Along(dimension) => Some(dimension),
        Merge::Mean => None,
    };
    check_alike(tensor, &column, dimension)?;
    match dimension {
        Some(dimension) => Ok(vec![Value::joined(column, dimension)]),
        None if column[0].kind() != ValueKind::Float => {
            let kind = column[0].kind();
            Err(SplitError(format!(
                "output {tensor} is {kind}: only floats have a mean; keep the list of microbatches, or join them"
            )))
        }
        None => Ok(vec![mean(column)]),
    }
}

/// Returns the error of a microbatch with another number of tensors than the first one.
pub(super) fn tensors_differ(microbatch: usize, found: usize, expected: usize) -> SplitError {
    SplitError(format!("microbatch {microbatch} holds {found} tensors, microbatch 0 holds {expected}"))
}

/// Checks that tensors agree in element type and in every dimension but the one along which they are joined.
pub(super) fn check_alike(
    tensor: usize,
    column: &[Value],
    dimension: Option<usize>,
) -> Result<(), SplitError> {
    let without = |value: &Value| {
        let mut shape = value.shape().to_vec();
        if let Some(size) = dimension.and_then(|dimension| shape.get_mut(dimension)) {
            *size = 0;
        }
        (shape, value.dtype())
    };
    if let Some(dimension) = dimension {
        size_along(tensor, &column[0], dimension)?;
    }
    match column.iter().position(|value| without(value) != without(&column[0])) {
        Some(microbatch) => {
            let found = column[microbatch].shape().to_vec();
            let expected = column[0].shape().to_vec();
            Err(SplitError(format!(
                "output {tensor} of microbatch {microbatch} is {found:?}, and of microbatch 0 it is {expected:?}: they \
                 differ in more than the dimension along which they join"
            )))
        }
        None => Ok(()),
    }
}

/// Adds in microbatch order, so that the same outputs have the same mean to the bit.
fn mean(column: Values) -> Value {
    let count = column.len() as f64;
    // The number of dimensions does not matter here; 1 is arbitrary.
    let tensors = column.into_iter().map(|value| Tensor::<1>::from_dispatch(value.into_dispatch()));
    let sum = tensors.reduce(|sum, tensor| sum + tensor).expect("a column has a tensor a microbatch");
    Value::of(sum / count)
}
