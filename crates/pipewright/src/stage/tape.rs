//! The tape of one forward: the leaves at which its backward ends, and the roots from which it starts.

use burn::tensor::{DType, Device, Gradients, Tensor};

use super::error::StageError;
use super::module::Auxiliary;
use super::shards::Catches;
use crate::autodiff::{GradientSlot, gradient_root, inner_of};
use crate::nn::{Deferred, at_least_single};
use crate::tensor::{OptionalTensors, Value, ValueKind, Values};

/// The start and the end points of one backward.
pub(super) struct Tape {
    /// The inputs as leaves; `None` for inputs that carry no gradient.
    pub(super) leaves: Vec<Option<Tensor<1>>>,
    /// The loss, from which the backward of the last stage starts.
    pub(super) loss: Option<Tensor<1>>,
    /// The outputs, from which the backward of every other stage starts.
    pub(super) outputs: Vec<OutputRoot>,
    /// The weighted auxiliary losses, which the backward of any stage starts from too.
    pub(super) auxiliary: Option<Tensor<1>>,
    /// The weight gradients that the layers defer; `None` if nothing was recorded.
    pub(super) deferred: Option<Deferred>,
    /// The other gradients, which are caught if parameters are sharded.
    pub(super) catches: Catches,
}

/// An output that the stage has returned.
pub(super) struct OutputRoot {
    shape: Vec<usize>,
    dtype: DType,
    /// `None` for outputs off the tape, which need no gradient.
    root: Option<(Tensor<1>, GradientSlot)>,
}

/// A backward that has run.
pub(super) struct FinishedTape {
    /// The gradients of the inputs and of the parameters; `None` if no parameter and no input has one.
    pub(super) gradients: Option<Gradients>,
    pub(super) leaves: Vec<Option<Tensor<1>>>,
    pub(super) deferred: Option<Deferred>,
    pub(super) catches: Catches,
}

impl Tape {
    /// Makes the tape of a forward with a loss, or with outputs.
    pub(super) fn new(
        leaves: Vec<Option<Tensor<1>>>,
        loss: Option<Tensor<1>>,
        outputs: Vec<OutputRoot>,
        auxiliary: Option<Tensor<1>>,
    ) -> Self {
        Self { leaves, loss, outputs, auxiliary, deferred: None, catches: Catches::new() }
    }

    /// Adds the collectors of gradients that the forward ran with.
    pub(super) fn with(self, deferred: Deferred, catches: Catches) -> Self {
        Self { deferred: Some(deferred), catches, ..self }
    }

    /// Runs the backward, from the loss or from the gradients of the outputs.
    pub(super) fn backward(self, gradients: OptionalTensors) -> Result<FinishedTape, StageError> {
        let Self { leaves, loss, outputs, auxiliary, deferred, catches } = self;
        let root = match loss {
            Some(loss) => Some(loss),
            None => plant(outputs, gradients)?,
        };
        let root = join(root, auxiliary).filter(Tensor::is_tracked);
        let gradients = root.map(|root| root.backward());
        Ok(FinishedTape { gradients, leaves, deferred, catches })
    }

    /// Frees the tensors that the operations recorded. Burn frees a tape only when its backward runs, so this runs the
    /// backward, with gradients of zero, and drops the result.
    pub(super) fn discard(self) {
        let Self { loss, outputs, auxiliary, .. } = self;
        let roots = outputs.into_iter().filter_map(|output| output.root.map(|(root, _)| root));
        let root = roots.fold(join(loss, auxiliary), |joined, root| join(joined, Some(root)));
        if let Some(root) = root.filter(Tensor::is_tracked) {
            drop(root.backward());
        }
    }
}

impl FinishedTape {
    /// Takes the gradients of the inputs out.
    pub(super) fn input_gradients(&mut self) -> OptionalTensors {
        let leaves = std::mem::take(&mut self.leaves);
        let Some(gradients) = &mut self.gradients else { return vec![None; leaves.len()] };
        leaves.into_iter().map(|leaf| Some(Value::of(leaf?.grad_remove(gradients)?))).collect()
    }
}

/// Returns an input for the module, and the leaf that collects its gradient if an earlier stage needs it. The input
/// goes on a tape of the module's kind, because tapes with and without gradient checkpointing do not mix.
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

/// Returns an output for the next stage, and the root through which its gradient comes back.
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
    let off_tape = |value: &Value| match value.kind() {
        ValueKind::Float => Value::of(inner_of(Tensor::<1>::from_dispatch(value.clone().into_dispatch()))),
        _ => value.clone(),
    };
    values.iter().map(off_tape).collect()
}

/// Returns the losses off the tape, as they are reported, and their weighted sum on the tape.
pub(super) fn split_auxiliary(
    losses: Vec<Auxiliary>,
    loss_weight: f64,
) -> Result<(Vec<Auxiliary>, Option<Tensor<1>>), StageError> {
    let mut weighted = None;
    let mut reported = Vec::with_capacity(losses.len());
    for Auxiliary { name, weight, loss } in losses {
        check_scalar(&loss, || format!("the auxiliary loss `{name}`"))?;
        let loss = at_least_single(loss);
        reported.push(Auxiliary { name, weight, loss: inner_of(loss.clone()) });
        weighted = join(weighted, Some(scaled(loss, weight * loss_weight)));
    }
    Ok((reported, weighted))
}

pub(super) fn check_scalar(loss: &Tensor<1>, what: impl Fn() -> String) -> Result<(), StageError> {
    match loss.dims() {
        [1] => Ok(()),
        [elements] => Err(StageError::LossShape { what: what(), elements }),
    }
}

pub(super) fn scaled(loss: Tensor<1>, factor: f64) -> Tensor<1> {
    if factor == 1.0 { loss } else { loss * factor }
}

fn join(a: Option<Tensor<1>>, b: Option<Tensor<1>>) -> Option<Tensor<1>> {
    // A loss that depends on no parameter and no input adds nothing to the backward pass.
    match (a.filter(Tensor::is_tracked), b.filter(Tensor::is_tracked)) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}

/// Stores each gradient at its output and joins the roots into one, from which the backward pass starts; `None` if no
/// output on the tape has a gradient.
fn plant(roots: Vec<OutputRoot>, gradients: OptionalTensors) -> Result<Option<Tensor<1>>, StageError> {
    if roots.len() != gradients.len() {
        return Err(StageError::GradientCount { outputs: roots.len(), gradients: gradients.len() });
    }
    let mut joined: Option<Tensor<1>> = None;
    for (index, (output, gradient)) in roots.into_iter().zip(gradients).enumerate() {
        // An output without a gradient adds nothing. Without a pipeline, the tape would not reach it either.
        let (Some((root, slot)), Some(gradient)) = (output.root, gradient) else { continue };
        let shape = gradient.shape().to_vec();
        if shape != output.shape {
            return Err(StageError::GradientShape { index, output: output.shape, gradient: shape });
        }
        if gradient.dtype() != output.dtype {
            let (output, gradient) = (output.dtype, gradient.dtype());
            return Err(StageError::GradientType { index, output, gradient });
        }
        slot.fill(gradient);
        joined = Some(match joined {
            Some(joined) => joined + root,
            None => root,
        });
    }
    Ok(joined)
}
