//! Fixes the order in which the gradients of a tensor with several uses are added.
//!
//! Burn adds the gradients of a tensor in the order in which its tape runs, which depends on everything that
//! was computed before. The sum of three floats depends on that order. A branch is a node of its own on the
//! tape that shares the tensor's storage. With two branches for each use but the last one, every sum has two
//! terms:
//!
//! ```text
//! x ─┬─ use 1
//!    └─ ─┬─ use 2            gradient of x = g1 + (g2 + g3)
//!        └─ use 3
//! ```
//!
//! A stage boundary may cut any of the horizontal lines; the sum stays the same.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

use crate::tensor::{Value, ValueKind};

/// Returns a branch of `value`, or `value` itself if it is not on a tape.
pub(crate) fn branch(value: &Value) -> Value {
    let is_tracked = value.kind() == ValueKind::Float
        // The number of dimensions does not matter on the tape; 1 is arbitrary.
        && Tensor::<1>::from_dispatch(value.clone().into_dispatch()).is_tracked();
    if is_tracked {
        Value::from_dispatch(<Dispatch as BranchBackend>::branch(value.clone().into_dispatch()))
    } else {
        value.clone()
    }
}

/// Back ends that can record a branch.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait BranchBackend: Backend {
    /// See [`branch`].
    fn branch(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }
}

impl BranchBackend for Flex {}

#[cfg(feature = "cube")]
impl BranchBackend for burn::backend::Cube {}

impl<B: Backend, C: CheckpointStrategy> BranchBackend for Autodiff<B, C> {
    fn branch(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let (primitive, node) = tensor.into_parts();
        match Branch.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((), primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}

#[derive(Debug)]
struct Branch;

impl<B: Backend> Backward<B, 1> for Branch {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, gradient);
        }
    }
}
