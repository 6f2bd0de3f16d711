//! The ends of a tape: leaves where values come onto it, and roots where values leave it and their gradients
//! come back.

use burn::tensor::{DType, Device, Tensor};
use pipewright_schedule::words::counted;

use super::error::StageError;
use crate::autodiff::{Caught, GradientSlot, catch, gradient_root, inner_of};
use crate::tensor::{OptionalTensors, Value, ValueKind, Values};

/// A value that has left the tape.
#[derive(Debug)]
pub(super) struct OutputRoot {
    shape: Vec<usize>,
    dtype: DType,
    /// `None` for values off the tape, which need no gradient.
    pub(super) root: Option<(Tensor<1>, GradientSlot)>,
}

/// Returns an input for a layer, and the leaf that collects its gradient if an earlier layer needs it. The
/// input is put on a tape of the module's kind, because tapes with and without gradient checkpointing do not
/// mix.
pub(super) fn as_leaf(input: Value, device: &Device) -> (Value, Option<Tensor<1>>) {
    if input.kind() != ValueKind::Float {
        return (input, None);
    }
    let requires_grad = input.requires_grad();
    // The number of dimensions does not matter on the tape; 1 is arbitrary.
    let input = Tensor::<1>::from_dispatch(input.into_dispatch()).autodiff();
    let input = match device.gradient_checkpointing_strategy() {
        Some(strategy) => input.with_gradient_checkpointing_strategy(strategy),
        None => input,
    };
    if !requires_grad {
        return (Value::of(input), None);
    }
    let leaf = input.require_grad();
    (Value::of(leaf.clone()), Some(leaf))
}

/// Returns an input for a layer as [`as_leaf`] does, and its gradient once a backward has run. Only the tape
/// keeps the node, so nothing holds the storage of the input unless an operation needs it.
pub(super) fn as_input(input: Value, device: &Device) -> (Value, Option<Caught>) {
    let (input, leaf) = as_leaf(input, device);
    let Some(leaf) = leaf else { return (input, None) };
    drop(input);
    let caught = Caught::default();
    (Value::of(catch(&leaf, leaf.clone(), caught.clone())), Some(caught))
}

/// Returns an output for the next layer, and the root through which its gradient comes back.
pub(super) fn off_tape(output: Value) -> (Value, OutputRoot) {
    let (shape, dtype) = (output.shape().to_vec(), output.dtype());
    if output.kind() != ValueKind::Float {
        return (output, OutputRoot { shape, dtype, root: None });
    }
    let tensor = Tensor::<1>::from_dispatch(output.into_dispatch());
    if !tensor.is_tracked() {
        return (Value::of(inner_of(tensor)).constant(), OutputRoot { shape, dtype, root: None });
    }
    let slot = GradientSlot::default();
    let root = gradient_root(&Value::of(tensor.clone()), slot.clone());
    (Value::of(tensor.inner()), OutputRoot { shape, dtype, root: Some((root, slot)) })
}

/// Returns copies of values off the tape, which share their storage.
pub(super) fn all_off_tape(values: &[Value]) -> Values {
    values.iter().cloned().map(without_tape).collect()
}

/// Returns a value off the tape. It shares its storage.
pub(crate) fn without_tape(value: Value) -> Value {
    match value.kind() {
        // The number of dimensions does not matter on the tape; 1 is arbitrary.
        ValueKind::Float => Value::of(inner_of(Tensor::<1>::from_dispatch(value.into_dispatch()))),
        _ => value,
    }
}

/// Adds scalars from which a backward starts.
pub(super) fn join(a: Option<Tensor<1>>, b: Option<Tensor<1>>) -> Option<Tensor<1>> {
    // A loss that depends on no parameter and no input adds nothing to the backward pass.
    match (a.filter(Tensor::is_tracked), b.filter(Tensor::is_tracked)) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}

/// Stores each gradient at its output and joins the roots into one, from which the backward pass starts;
/// `None` if no output on the tape has a gradient.
pub(super) fn fill_roots(
    roots: Vec<OutputRoot>,
    gradients: OptionalTensors,
) -> Result<Option<Tensor<1>>, StageError> {
    if roots.len() != gradients.len() {
        let (gradients, outputs) = (counted(gradients.len(), "gradient"), counted(roots.len(), "output"));
        return Err(StageError::Mistake(format!("{gradients} arrived for {outputs}")));
    }
    let mut joined: Option<Tensor<1>> = None;
    for (index, (output, gradient)) in roots.into_iter().zip(gradients).enumerate() {
        // An output without a gradient adds nothing. Without a pipeline, the tape would not reach it either.
        let (Some((root, slot)), Some(gradient)) = (output.root, gradient) else { continue };
        let shape = gradient.shape().to_vec();
        if shape != output.shape {
            return Err(StageError::Mistake(format!(
                "the gradient of output {index} has shape {shape:?}, the output had {:?}",
                output.shape
            )));
        }
        if gradient.dtype() != output.dtype {
            return Err(StageError::Mistake(format!(
                "the gradient of output {index} has the type {:?}, the output had {:?}",
                gradient.dtype(),
                output.dtype
            )));
        }
        slot.fill(gradient);
        joined = Some(match joined {
            Some(joined) => joined + root,
            None => root,
        });
    }
    Ok(joined)
}
