//! Records an operation whose backward pass is composed of tensor operations, so that it runs on every
//! device.
//!
//! The caller computes the result off the tape. [`record`], [`record_one`] and [`record_four`] put it on the
//! tape with a [`Rule`], which the backward pass asks for the gradients of the inputs. The tape keeps the rule,
//! with the tensors that it needs, and no other tensor.

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

/// The backward pass of an operation on `N` inputs.
pub(crate) trait Rule<const N: usize = 2>: Debug + Send + Sync {
    /// Returns the gradients of the inputs from the gradient of the result, all off the tape. `wanted` says
    /// which inputs need theirs.
    fn backward(&self, gradient: Tensor<2>, wanted: [bool; N]) -> [Option<Tensor<2>>; N];
}

/// Returns `result`, which is off the tape, as the result of an operation on `inputs`. If no input is on a
/// tape, neither is the result.
pub(crate) fn record(inputs: [Tensor<2>; 2], result: Tensor<2>, rule: Arc<dyn Rule>) -> Tensor<2> {
    let Some(([first, second], result)) = on_one_tape(&inputs, &result) else { return result };
    Tensor::from_dispatch(<Dispatch as RecordBackend>::record(first, second, result, rule))
}

/// Like [`record`], but for an operation on one input.
pub(crate) fn record_one(input: Tensor<2>, result: Tensor<2>, rule: Arc<dyn Rule<1>>) -> Tensor<2> {
    let Some(([input], result)) = on_one_tape(&[input], &result) else { return result };
    Tensor::from_dispatch(<Dispatch as RecordBackend>::record_one(input, result, rule))
}

/// Like [`record`], but for an operation on four inputs.
pub(crate) fn record_four(inputs: [Tensor<2>; 4], result: Tensor<2>, rule: Arc<dyn Rule<4>>) -> Tensor<2> {
    let Some(([first, second, third, fourth], result)) = on_one_tape(&inputs, &result) else { return result };
    Tensor::from_dispatch(<Dispatch as RecordBackend>::record_four(
        first, second, third, fourth, result, rule,
    ))
}

/// Returns the inputs and the result on the tape of the inputs; `None` if no input is on one.
fn on_one_tape<const N: usize>(
    inputs: &[Tensor<2>; N],
    result: &Tensor<2>,
) -> Option<([DispatchTensor; N], DispatchTensor)> {
    let tracked = inputs.iter().find(|input| input.is_autodiff())?;
    let on_tape = |tensor: &Tensor<2>| on_tape_of(tensor.clone(), tracked).into_dispatch();
    Some((inputs.each_ref().map(on_tape), on_tape(result)))
}

/// Back ends that can record an operation. Without a tape there is no backward pass.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait RecordBackend: Backend {
    /// See [`record`].
    fn record(
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        result: FloatTensor<Self>,
        rule: Arc<dyn Rule>,
    ) -> FloatTensor<Self> {
        let _ = (first, second, rule);
        result
    }

    /// See [`record_one`].
    fn record_one(
        input: FloatTensor<Self>,
        result: FloatTensor<Self>,
        rule: Arc<dyn Rule<1>>,
    ) -> FloatTensor<Self> {
        let _ = (input, rule);
        result
    }

    /// See [`record_four`].
    fn record_four(
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        third: FloatTensor<Self>,
        fourth: FloatTensor<Self>,
        result: FloatTensor<Self>,
        rule: Arc<dyn Rule<4>>,
    ) -> FloatTensor<Self> {
        let _ = (first, second, third, fourth, rule);
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
        recorded::<B, C, 2>([first, second], result, rule)
    }

    fn record_one(
        input: FloatTensor<Self>,
        result: FloatTensor<Self>,
        rule: Arc<dyn Rule<1>>,
    ) -> FloatTensor<Self> {
        recorded::<B, C, 1>([input], result, rule)
    }

    fn record_four(
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        third: FloatTensor<Self>,
        fourth: FloatTensor<Self>,
        result: FloatTensor<Self>,
        rule: Arc<dyn Rule<4>>,
    ) -> FloatTensor<Self> {
        recorded::<B, C, 4>([first, second, third, fourth], result, rule)
    }
}

fn recorded<B, C, const N: usize>(
    inputs: [FloatTensor<Autodiff<B, C>>; N],
    result: FloatTensor<Autodiff<B, C>>,
    rule: Arc<dyn Rule<N>>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<B>,
{
    let nodes = inputs.map(|input| input.into_parts().1);
    let result = result.into_primitive();
    match Recorded.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(rule, result),
        OpsKind::UnTracked(prep) => prep.finish(result),
    }
}

#[derive(Debug)]
struct Recorded;

impl<B, const N: usize> Backward<B, N> for Recorded
where
    B: Backend,
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Arc<dyn Rule<N>>;

    fn backward(
        self,
        ops: Ops<Arc<dyn Rule<N>>, N>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
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
