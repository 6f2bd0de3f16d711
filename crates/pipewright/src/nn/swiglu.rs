//! The gated activation of the feed-forward layer (Shazeer, 2020).

use std::sync::Arc;

use burn::tensor::{Tensor, activation};
use pipewright_kernel::swiglu::{backward, backward_bf16, forward, forward_bf16};
use pipewright_schedule::recompute::LayerPart;

use super::composed::at_least_single;
use super::operation::{
    CpuTensor, Operation, cpu_tensor, elements, from_cpu, in_bf16, on_cpu, tensor_of, with_dtype,
};
use super::remade::note;
use crate::autodiff::{Rule, inner_of, record};

/// Returns `silu(gate) * up`, with `silu(x) = x / (1 + exp(-x))`. All shapes are the same.
///
/// # Panics
/// When the shapes differ.
pub fn swiglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    let shape = gate.dims();
    let of_up = up.dims();
    assert!(shape == of_up, "swiglu takes two tensors of one shape, got {shape:?} and {of_up:?}");
    let inputs = [gate.clone().into_dispatch(), up.clone().into_dispatch()];
    let Some(([gate, up], tape)) = on_cpu(inputs) else { return on_device(gate, up) };
    let y = tape.rounded(activated(&gate, &up));
    let (precision, kept) = (y.dtype(), [gate.clone(), up.clone()]);
    let y = tape.record_tensor(y, |_| SwigluBackward { gate, up, shape });
    note(LayerPart::FeedForward, &y, || {
        move || from_cpu(with_dtype(activated(&kept[0], &kept[1]), precision))
    });
    y
}

/// Returns `silu(gate) * up`, in bfloat16 if both are, and otherwise in single precision.
pub(super) fn activated(gate: &CpuTensor, up: &CpuTensor) -> CpuTensor {
    let shape = gate.layout().shape().clone();
    match in_bf16([gate, up]) {
        Some([gate, up]) => tensor_of(forward_bf16(gate, up), shape),
        None => cpu_tensor(forward(&elements(gate), &elements(up)), shape),
    }
}

/// The operation for tensors that [`on_cpu`] does not take.
fn on_device(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    let rule = SwigluRule { gate: inner_of(gate.clone()), up: inner_of(up.clone()) };
    let kept = [rule.gate.clone(), rule.up.clone()];
    let y = record([gate, up], activated_on_device(&kept), Arc::new(rule));
    note(LayerPart::FeedForward, &y, || move || activated_on_device(&kept));
    y
}

fn activated_on_device([gate, up]: &[Tensor<2>; 2]) -> Tensor<2> {
    let wide = activation::silu(at_least_single(gate.clone())) * at_least_single(up.clone());
    wide.cast(gate.dtype())
}

#[derive(Debug)]
struct SwigluRule {
    gate: Tensor<2>,
    up: Tensor<2>,
}

impl Rule for SwigluRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let [gate, up] = [&self.gate, &self.up].map(|x| at_least_single(x.clone()));
        let gradient = at_least_single(gradient);
        let share = activation::sigmoid(gate.clone());
        let activated = gate * share.clone();
        // The slope of `x sigmoid(x)` is `sigmoid(x) + x sigmoid(x) (1 - sigmoid(x))`.
        let slope = share.clone() + activated.clone() * (share.neg() + 1.0);
        let (d_gate, d_up) = (gradient.clone() * up * slope, gradient * activated);
        [Some(d_gate.cast(self.gate.dtype())), Some(d_up.cast(self.up.dtype()))]
    }
}

#[derive(Clone, Debug)]
struct SwigluBackward {
    gate: CpuTensor,
    up: CpuTensor,
    shape: [usize; 2],
}

impl Operation<2> for SwigluBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 2]) -> [Option<CpuTensor>; 2] {
        let Self { gate, up, shape } = &self;
        if let Some([gate, up, gradient]) = in_bf16([gate, up, &gradient]) {
            let (d_gate, d_up) = backward_bf16(gate, up, gradient);
            return [d_gate, d_up].map(|d| Some(tensor_of(d, *shape)));
        }
        let (d_gate, d_up) = backward(&elements(gate), &elements(up), &elements(&gradient));
        [d_gate, d_up].map(|d| Some(cpu_tensor(d, *shape)))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::super::check::{check, numbers};
    use super::*;

    fn composed(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
        activation::silu(gate) * up
    }

    #[test]
    fn equals_its_composition() {
        let two = |[a, b]: [Tensor<1>; 2]| [a, b].map(|x| x.reshape([5, 9]));
        check(
            [numbers([45], 6.0), numbers([45], 2.0)],
            |x| {
                let [gate, up] = two(x);
                swiglu(gate, up)
            },
            |x| {
                let [gate, up] = two(x);
                composed(gate, up)
            },
        );
    }

    #[test]
    fn extreme_gates_stay_finite() {
        let device = Device::flex().autodiff();
        let gate = Tensor::from_data(TensorData::new(vec![-1e4f32, -100.0, 100.0, 1e4], [1, 4]), &device)
            .require_grad();
        let result = swiglu(gate.clone(), Tensor::ones([1, 4], &device));
        let gradient = gate.grad(&result.clone().sum().backward()).expect("it is a leaf");
        let list = |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        assert_eq!(list(result), [0.0, 0.0, 100.0, 1e4]);
        assert_eq!(list(gradient), [0.0, 0.0, 1.0, 1.0]);
    }
}
