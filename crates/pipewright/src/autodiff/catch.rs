//! Catches the gradient of a tensor on the tape, for tensors that are not leaves.
//!
//! Burn finds the gradient of a parameter by the parameter's node on the tape, which the parameter holds
//! together with its storage. A stage with sharded parameters frees that storage between a forward and its
//! backward; when the backward runs, the parameter has other storage and another node. So the stage's module
//! does not compute with a leaf but with the result of [`catch`]: an operation without arithmetic whose
//! backward stores the gradient in [`Caught`].
//!
//! ```text
//! forward:   anchor (a scalar leaf), storage --catch--> parameter as the module sees it
//! backward:  gradient of the parameter --> Caught; the anchor gets none
//! ```

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchKindConversion, DispatchTensor, Flex, backend_extension,
};
use burn::tensor::Tensor;

use super::on_tape::on_tape_of;
use crate::tensor::Value;

/// Holds a caught gradient.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caught(Arc<Mutex<Option<DispatchTensor>>>);

impl Caught {
    /// Returns the gradient, if the backward pass reached the tensor.
    pub(crate) fn take(&self) -> Option<Value> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().map(Value::from_dispatch)
    }

    fn fill(&self, gradient: DispatchTensor) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradient);
    }
}

/// Returns `value` as a tensor on the tape of `anchor`, a leaf that requires a gradient. A backward pass
/// stores the gradient of the result in `caught`.
pub(crate) fn catch<const D: usize>(anchor: &Tensor<1>, value: Tensor<D>, caught: Caught) -> Tensor<D> {
    let value = on_tape_of(value.inner(), anchor);
    let (anchor, value) = (anchor.clone().into_dispatch(), value.into_dispatch());
    Tensor::from_dispatch(<Dispatch as CatchBackend>::catch(anchor, value, caught))
}

/// Back ends that can record a catch.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait CatchBackend: Backend {
    /// See [`catch`].
    fn catch(anchor: FloatTensor<Self>, value: FloatTensor<Self>, caught: Caught) -> FloatTensor<Self> {
        // Without a tape there is no gradient.
        let _ = (anchor, caught);
        value
    }
}

impl CatchBackend for Flex {}

#[cfg(feature = "cube")]
impl CatchBackend for burn::backend::Cube {}

impl<B, C> CatchBackend for Autodiff<B, C>
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<B>,
{
    fn catch(anchor: FloatTensor<Self>, value: FloatTensor<Self>, caught: Caught) -> FloatTensor<Self> {
        let (_, node) = anchor.into_parts();
        let value = value.into_primitive();
        match Catch.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(caught, value),
            OpsKind::UnTracked(prep) => prep.finish(value),
        }
    }
}

#[derive(Debug)]
struct Catch;

impl<B> Backward<B, 1> for Catch
where
    B: Backend,
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Caught;

    fn backward(self, ops: Ops<Caught, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        // The number of dimensions does not matter here; 1 is arbitrary.
        ops.state.fill(Tensor::<1>::from_primitive::<B>(gradient).into_dispatch());
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn the_gradient_is_caught_and_summed_over_uses() {
        let device = Device::flex();
        let anchor = Tensor::<1>::zeros([1], &device).autodiff().require_grad();
        let (x, caught) = (Tensor::<2>::from_data([[1.0, 2.0]], &device), Caught::default());
        let y = catch(&anchor, x, caught.clone());
        let gradients = (y.clone() * 3.0 + y.clone() * y).sum().backward();
        assert!(anchor.grad(&gradients).is_none());
        let gradient = caught.take().expect("the pass came by");
        assert_eq!(gradient.into_data().try_to_vec::<f32>().expect("floats"), [5.0, 7.0]);
        assert!(caught.take().is_none());
    }

    #[test]
    fn an_unused_tensor_catches_no_gradient() {
        let device = Device::flex();
        let anchor = Tensor::<1>::zeros([1], &device).autodiff().require_grad();
        let (used, unused) = (Caught::default(), Caught::default());
        let y = catch(&anchor, Tensor::<1>::ones([2], &device), used.clone());
        let _ = catch(&anchor, Tensor::<1>::ones([2], &device), unused.clone());
        y.sum().backward();
        assert!(used.take().is_some());
        assert!(unused.take().is_none());
    }
}
