//! The squared rectifier (So et al., 2021).

use std::sync::Arc;

use burn::tensor::{Tensor, activation};
use pipewright_kernel::relu_squared::{backward, backward_bf16, forward, forward_bf16};
use pipewright_schedule::recompute::LayerPart;

use super::operation::{
    CpuTensor, Operation, cpu_tensor, elements, from_cpu, in_bf16, on_cpu, tensor_of, with_dtype,
};
use super::remade::note;
use crate::autodiff::{Rule, inner_of, record};

/// Returns `max(x, 0)²`, element by element. The result has the shape of `x`.
pub fn relu_squared(x: Tensor<2>) -> Tensor<2> {
    let shape = x.dims();
    let Some(([x], tape)) = on_cpu([x.clone().into_dispatch()]) else { return on_device(x) };
    let y = tape.rounded(activated(&x));
    let (precision, kept) = (y.dtype(), x.clone());
    let y = tape.record_tensor(y, |_| ReluSquaredBackward { x, shape });
    note(LayerPart::FeedForward, &y, || move || from_cpu(with_dtype(activated(&kept), precision)));
    y
}

/// Returns `max(x, 0)²`, in bfloat16 if `x` is, and otherwise in single precision.
pub(super) fn activated(x: &CpuTensor) -> CpuTensor {
    let shape = x.layout().shape().clone();
    match in_bf16([x]) {
        Some([x]) => tensor_of(forward_bf16(x), shape),
        None => cpu_tensor(forward(&elements(x)), shape),
    }
}

/// The operation for tensors that [`on_cpu`] does not take.
fn on_device(x: Tensor<2>) -> Tensor<2> {
    let kept = inner_of(x.clone());
    let compute = |x: Tensor<2>| activation::relu(x).square();
    let rule = Arc::new(ReluSquaredRule { x: kept.clone() });
    let y = record([x.clone(), x], compute(kept.clone()), rule);
    note(LayerPart::FeedForward, &y, || move || compute(kept.clone()));
    y
}

#[derive(Debug)]
struct ReluSquaredRule {
    x: Tensor<2>,
}

impl Rule for ReluSquaredRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        [Some(activation::relu(self.x.clone()) * 2.0 * gradient), None]
    }
}

#[derive(Clone, Debug)]
struct ReluSquaredBackward {
    x: CpuTensor,
    shape: [usize; 2],
}

impl Operation<1> for ReluSquaredBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { x, shape } = &self;
        [Some(match in_bf16([x, &gradient]) {
            Some([x, gradient]) => tensor_of(backward_bf16(x, gradient), *shape),
            None => cpu_tensor(backward(&elements(x), &elements(&gradient)), *shape),
        })]
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check, numbers};
    use super::*;

    fn composed(x: Tensor<2>) -> Tensor<2> {
        activation::relu(x).square()
    }

    #[test]
    fn equals_its_composition() {
        check([numbers([45], 3.0)], |[x]| relu_squared(x.reshape([5, 9])), |[x]| composed(x.reshape([5, 9])));
    }
}
