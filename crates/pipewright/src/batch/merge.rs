//! How the outputs of the microbatches are joined.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use pipewright_schedule::error_text::panic_message;
use pipewright_schedule::words::counted;

use super::split::{Nested, SplitError, check_count, flat, size_along};
use crate::tensor::{Boundary, BoundaryError, Value, ValueKind, Values, pack, unpack};

/// How an output's microbatches are joined.
#[derive(Clone, Debug)]
pub enum Merge {
    /// Joined along a dimension.
    Along(usize),
    /// The mean of float tensors of one shape; each microbatch has the same weight.
    Mean,
    /// The sum of float or integer tensors of one shape, added in microbatch order.
    Sum,
    /// Joined by a function; [`Merge::function`] makes it.
    Function(MergeFunction),
    /// Not joined: a list in microbatch order.
    List,
}

impl Merge {
    /// Joins by a function. It gets the tensor of every microbatch, in microbatch order, and returns one tensor.
    /// The shapes of the microbatches may differ.
    ///
    /// The types are the function's: `Vec<Tensor<2>>` for a float tensor with two dimensions, and `Vec<Values>`
    /// for tensors of any form.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use pipewright::batch::{Merge, merge_by, split};
    /// use pipewright::tensor::{pack, unpack};
    ///
    /// let device = Device::flex();
    /// let outputs = split(&pack(Tensor::<2>::from_floats([[1.0], [4.0], [2.0], [3.0]], &device)), 2)?;
    /// let largest = Merge::function(|parts: Vec<Tensor<2>>| Tensor::cat(parts, 0).max());
    /// let largest: Tensor<1> = unpack(merge_by(outputs, largest)?.concat())?;
    /// assert_eq!(largest.into_scalar::<f32>(), 4.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn function<T: Boundary, R: Boundary>(join: impl Fn(Vec<T>) -> R + Send + Sync + 'static) -> Self {
        let join = move |tensor: usize, column: Values| {
            let typed = (0..).zip(column).map(|(microbatch, value): (u32, _)| {
                unpack(vec![value]).map_err(|error| not_taken(tensor, microbatch, &error))
            });
            let typed = typed.collect::<Result<Vec<T>, SplitError>>()?;
            let joined = catch_unwind(AssertUnwindSafe(|| pack(join(typed)))).map_err(|panic| {
                SplitError(format!(
                    "the function that joins output {tensor} panicked: {}",
                    panic_message(&*panic)
                ))
            })?;
            let [joined] = <[Value; 1]>::try_from(joined).map_err(|all| {
                SplitError(format!(
                    "the function that joins output {tensor} returned {}: return one",
                    counted(all.len(), "tensor")
                ))
            })?;
            Ok(joined)
        };
        Self::Function(MergeFunction(Arc::new(join)))
    }
}

/// The function of [`Merge::Function`]. Clones share it.
#[derive(Clone)]
pub struct MergeFunction(Arc<JoinColumn>);

/// Joins the microbatches of an output, whose index is the first argument.
type JoinColumn = dyn Fn(usize, Values) -> Result<Value, SplitError> + Send + Sync;

impl fmt::Debug for MergeFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MergeFunction")
    }
}

/// Returns the error of a tensor that is not of the type that the function takes.
fn not_taken(tensor: usize, microbatch: u32, error: &BoundaryError) -> SplitError {
    let reason = match error {
        BoundaryError::Mismatch { .. } => error.to_string(),
        _ => "an output is one tensor, and the function takes another number of tensors".to_owned(),
    };
    SplitError(format!(
        "the function that joins output {tensor} cannot take the tensor of microbatch {microbatch}: {reason}"
    ))
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
/// with [`Merge::List`].
///
/// # Errors
/// When there are more or fewer specs than outputs, or tensors that are joined do not match, or a function panics,
/// does not take an output's tensors, or does not return one tensor.
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
    match spec {
        Merge::List => Ok(column),
        Merge::Along(dimension) => {
            check_alike(tensor, &column, Some(dimension))?;
            Ok(vec![Value::joined(column, dimension)])
        }
        Merge::Sum => Ok(vec![sum_of(tensor, column)?]),
        Merge::Mean if column[0].kind() != ValueKind::Float => {
            let kind = column[0].kind();
            Err(SplitError(format!(
                "output {tensor} is {kind}: only floats have a mean; keep the list of microbatches, or join them"
            )))
        }
        Merge::Mean => {
            let count = column.len() as f64;
            // The number of dimensions does not matter here; 1 is arbitrary.
            let sum = Tensor::<1>::from_dispatch(sum_of(tensor, column)?.into_dispatch());
            Ok(vec![Value::of(sum / count)])
        }
        Merge::Function(MergeFunction(join)) => Ok(vec![join(tensor, column)?]),
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
            let reason = match dimension {
                Some(_) => "they differ in more than the dimension along which they join",
                None => "a sum or a mean needs one shape and one element type",
            };
            Err(SplitError(format!(
                "output {tensor} of microbatch {microbatch} is {found:?}, and of microbatch 0 it is {expected:?}: {reason}"
            )))
        }
        None => Ok(()),
    }
}

/// Adds in microbatch order, so that the same outputs have the same sum to the bit.
fn sum_of(tensor: usize, column: Values) -> Result<Value, SplitError> {
    check_alike(tensor, &column, None)?;
    let (kind, tensors) = (column[0].kind(), column.into_iter().map(Value::into_dispatch));
    // The number of dimensions does not matter here; 1 is arbitrary.
    let sum = match kind {
        ValueKind::Float => {
            let sum = tensors.map(Tensor::<1>::from_dispatch).reduce(|sum, tensor| sum + tensor);
            sum.map(Value::of)
        }
        ValueKind::Int => {
            let sum = tensors.map(Tensor::<1, Int>::from_dispatch).reduce(|sum, tensor| sum + tensor);
            sum.map(Value::of)
        }
        ValueKind::Bool => {
            return Err(SplitError(format!(
                "output {tensor} is bool: only numbers have a sum; keep the list of microbatches, or join them"
            )));
        }
    };
    Ok(sum.expect("a column has a tensor for each microbatch"))
}
