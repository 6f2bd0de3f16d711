//! The gated activation with bounds of gpt-oss.

use burn::tensor::{Tensor, activation};
use pipewright_kernel::clamped_gate::{Bounds, backward, forward};

use super::composed::at_least_single;
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, on_cpu};

/// Returns `(up + 1) gate sigmoid(alpha gate)`, where the gate is at most `limit`, and `up` is between `-limit`
/// and `limit`. All shapes are the same.
///
/// # Panics
/// When the shapes differ.
pub(super) fn clamped_gate(gate: Tensor<2>, up: Tensor<2>, [alpha, limit]: [f64; 2]) -> Tensor<2> {
    let shape = gate.dims();
    assert!(shape == up.dims(), "a gate has the shape of what it gates, got {shape:?} and {:?}", up.dims());
    let inputs = [gate.clone().into_dispatch(), up.clone().into_dispatch()];
    let Some(([gate, up], tape)) = on_cpu(inputs) else { return composed(gate, up, [alpha, limit]) };
    let bounds = Bounds { alpha: alpha as f32, limit: limit as f32 };
    let y = forward(&elements(&gate), &elements(&up), bounds);
    tape.record(y, shape, |_| ClampedBackward { gate, up, bounds, shape })
}

fn composed(gate: Tensor<2>, up: Tensor<2>, [alpha, limit]: [f64; 2]) -> Tensor<2> {
    let precision = up.dtype();
    let gate = at_least_single(gate).clamp_max(limit);
    let up = at_least_single(up).clamp(-limit, limit);
    let gated = gate.clone() * activation::sigmoid(gate * alpha);
    ((up + 1.0) * gated).cast(precision)
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
