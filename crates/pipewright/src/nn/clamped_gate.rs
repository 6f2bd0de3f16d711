//! The gated activation with bounds of gpt-oss.

use std::sync::Arc;

use burn::tensor::{Tensor, activation};
use pipewright_kernel::clamped_gate::{Bounds, backward, forward, forward_bf16};

use super::composed::at_least_single;
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, in_bf16, on_cpu, tensor_of};
use crate::autodiff::{Rule, inner_of, record};

/// Returns `(up + 1) gate sigmoid(alpha gate)`, where the gate is at most `limit`, and `up` is between `-limit`
/// and `limit`. All shapes are the same.
///
/// # Panics
/// When the shapes differ.
pub(super) fn clamped_gate(gate: Tensor<2>, up: Tensor<2>, [alpha, limit]: [f64; 2]) -> Tensor<2> {
    let shape = gate.dims();
    assert!(shape == up.dims(), "a gate has the shape of what it gates, got {shape:?} and {:?}", up.dims());
    let inputs = [gate.clone().into_dispatch(), up.clone().into_dispatch()];
    let Some(([gate, up], tape)) = on_cpu(inputs) else { return on_device(gate, up, [alpha, limit]) };
    let bounds = bounds([alpha, limit]);
    let y = tape.rounded(activated(&gate, &up, bounds));
    tape.record_tensor(y, |_| ClampedBackward { gate, up, bounds, shape })
}

/// Returns the constants for the kernel.
pub(super) fn bounds([alpha, limit]: [f64; 2]) -> Bounds {
    Bounds { alpha: alpha as f32, limit: limit as f32 }
}

/// Returns the activation, in bfloat16 if both inputs are, and otherwise in single precision.
pub(super) fn activated(gate: &CpuTensor, up: &CpuTensor, bounds: Bounds) -> CpuTensor {
    let shape = gate.layout().shape().clone();
    match in_bf16([gate, up]) {
        Some([gate, up]) => tensor_of(forward_bf16(gate, up, bounds), shape),
        None => cpu_tensor(forward(&elements(gate), &elements(up), bounds), shape),
    }
}

/// The operation for tensors that [`on_cpu`] does not take.
fn on_device(gate: Tensor<2>, up: Tensor<2>, [alpha, limit]: [f64; 2]) -> Tensor<2> {
    let rule = ClampedRule { gate: inner_of(gate.clone()), up: inner_of(up.clone()), alpha, limit };
    let (bounded, share) = rule.gate();
    let y = ((rule.up() + 1.0) * bounded * share).cast(rule.up.dtype());
    record([gate, up], y, Arc::new(rule))
}

#[derive(Debug)]
struct ClampedRule {
    gate: Tensor<2>,
    up: Tensor<2>,
    alpha: f64,
    limit: f64,
}

impl ClampedRule {
    /// Returns the bounded gate, and the sigmoid of it times `alpha`.
    fn gate(&self) -> (Tensor<2>, Tensor<2>) {
        let bounded = at_least_single(self.gate.clone()).clamp_max(self.limit);
        (bounded.clone(), activation::sigmoid(bounded * self.alpha))
    }

    /// Returns the bounded `up`.
    fn up(&self) -> Tensor<2> {
        at_least_single(self.up.clone()).clamp(-self.limit, self.limit)
    }
}

impl Rule for ClampedRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let Self { gate, up, alpha, limit } = self;
        let gradient = at_least_single(gradient);
        let (bounded, share) = self.gate();
        let gated = bounded * share.clone();
        let slope = share.clone() + gated.clone() * (share.neg() + 1.0) * *alpha;
        // A number beyond a bound does not change the result.
        let above = at_least_single(gate.clone()).greater_elem(*limit);
        let outside = at_least_single(up.clone()).abs().greater_elem(*limit);
        let d_gate = (gradient.clone() * (self.up() + 1.0) * slope).mask_fill(above, 0.0);
        let d_up = (gradient * gated).mask_fill(outside, 0.0);
        [Some(d_gate.cast(gate.dtype())), Some(d_up.cast(up.dtype()))]
    }
}

#[derive(Clone, Debug)]
struct ClampedBackward {
    gate: CpuTensor,
    up: CpuTensor,
    bounds: Bounds,
    shape: [usize; 2],
}

impl Operation<2> for ClampedBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 2]) -> [Option<CpuTensor>; 2] {
        let Self { gate, up, bounds, shape } = &self;
        let (d_gate, d_up) = backward(&elements(gate), &elements(up), &elements(&gradient), *bounds);
        [d_gate, d_up].map(|d| Some(cpu_tensor(d, *shape)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check, numbers};
    use super::*;

    fn composed(gate: Tensor<2>, up: Tensor<2>, [alpha, limit]: [f64; 2]) -> Tensor<2> {
        let precision = up.dtype();
        let gate = at_least_single(gate).clamp_max(limit);
        let up = at_least_single(up).clamp(-limit, limit);
        let gated = gate.clone() * activation::sigmoid(gate * alpha);
        ((up + 1.0) * gated).cast(precision)
    }

    #[test]
    fn equals_its_composition() {
        let two = |[a, b]: [Tensor<1>; 2]| [a, b].map(|x| x.reshape([5, 9]));
        for constants in [[1.702, 7.0], [0.7, 0.9]] {
            check(
                [numbers([45], 9.0), numbers([45], 2.0)],
                |x| {
                    let [gate, up] = two(x);
                    clamped_gate(gate, up, constants)
                },
                |x| {
                    let [gate, up] = two(x);
                    composed(gate, up, constants)
                },
            );
        }
    }
}
