//! Records an operation whose backward pass is composed of tensor operations, so that it runs on every
//! device.
//!
//! The caller computes the result off the tape. [`record`] puts it on the tape with a [`Rule`], which the
//! backward pass asks for the gradients of the two inputs.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchKindConversion, DispatchTensor, Flex, backend_extension,
};
use burn::tensor::Tensor;

use super::on_tape::on_tape_of;

/// The backward pass of an operation on two inputs.
pub(crate) trait Rule: Debug + Send + Sync {
    /// Returns the gradients of the inputs from the gradient of the result, all off the tape. `wanted` says
    /// which inputs need theirs.
    fn backward(&self, gradient: Tensor<2>, wanted: [bool; 2]) -> [Option<Tensor<2>>; 2];
}

/// Returns `result`, which is off the tape, as the result of an operation on `inputs`. If no input is on a
/// tape, neither is the result.
pub(crate) fn record(inputs: [Tensor<2>; 2], result: Tensor<2>, rule: Arc<dyn Rule>) -> Tensor<2> {
    let Some(tracked) = inputs.iter().find(|input| input.is_autodiff()).cloned() else { return result };
    let on_tape = |tensor: Tensor<2>| on_tape_of(tensor, &tracked).into_dispatch();
    let [first, second] = inputs.map(on_tape);
    Tensor::from_dispatch(<Dispatch as RecordBackend>::record(first, second, on_tape(result), rule))
}

/// Back ends that can record an operation.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait RecordBackend: Backend {
    /// See [`record`].
    fn record(
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        result: FloatTensor<Self>,
        rule: Arc<dyn Rule>,
    ) -> FloatTensor<Self> {
        // Without a tape there is no backward pass.
        let _ = (first, second, rule);
        result
    }
}

impl RecordBackend for Flex {}

#[cfg(feature = "cube")]
impl RecordBackend for burn::backend::Cube {}

impl<B, C> RecordBackend for Autodiff<B, C>
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<B>,
{
    fn record(
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        result: FloatTensor<Self>,
        rule: Arc<dyn Rule>,
    ) -> FloatTensor<Self> {
        let nodes = [first.into_parts().1, second.into_parts().1];
        let result = result.into_primitive();
        match Recorded.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(rule, result),
            OpsKind::UnTracked(prep) => prep.finish(result),
        }
    }
}

#[derive(Debug)]
struct Recorded;

impl<B> Backward<B, 2> for Recorded
where
    B: Backend,
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Arc<dyn Rule>;

    fn backward(self, ops: Ops<Arc<dyn Rule>, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = Tensor::from_primitive::<B>(grads.consume::<B>(&ops.node));
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let gradients = ops.state.backward(gradient, wanted);
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            let (Some(parent), Some(gradient)) = (parent, gradient) else { continue };
            let gradient = gradient.try_into_primitive::<B>();
            let gradient = gradient.expect("a rule computes on the back end of the gradient, off the tape");
            grads.register::<B>(parent.id, gradient);
        }
    }
}
