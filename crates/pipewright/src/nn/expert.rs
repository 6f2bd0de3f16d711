//! One expert of a mixture, and mixtures composed of Burn's operations.

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData};
use pipewright_kernel::grouped::Groups;

use super::linear::Linear;
use super::relu_squared::relu_squared;
use super::swiglu::swiglu;

/// A feed-forward layer: `down(silu(gate(x)) * up(x))` with a gate, `down(max(up(x), 0)²)` without. Its
/// layers have no bias.
#[derive(Module, Debug)]
pub struct Expert {
    /// Weight `[width, inner]`.
    pub gate_proj: Option<Linear>,
    /// Weight `[width, inner]`.
    pub up_proj: Linear,
    /// Weight `[inner, width]`.
    pub down_proj: Linear,
}

impl Expert {
    /// Returns the gate, if there is one, and the layers up and down.
    pub(super) fn layers(&self) -> Vec<&Linear> {
        self.gate_proj.iter().chain([&self.up_proj, &self.down_proj]).collect()
    }

    /// Returns the expert's result for each token. Shapes: `[tokens, width]` in and out.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let up = self.up_proj.forward(x.clone());
        self.down_proj.forward(match &self.gate_proj {
            Some(gate) => swiglu(gate.forward(x), up),
            None => relu_squared(up),
        })
    }
}

/// Returns the mixture, composed of Burn's operations. An expert that no token chose computes the first
/// token, and its result is not used. So its parameters have a gradient, which is zero. Choices of experts
/// that are not here have a row of zeros.
pub(super) fn composed(x: Tensor<2>, weights: Tensor<2>, experts: &[&Expert], groups: &Groups) -> Tensor<2> {
    let ([tokens, width], [_, count]) = (x.dims(), weights.dims());
    let device = x.device();
    let of_row: Vec<usize> = groups.tokens().collect();
    let mut indices = vec![None; tokens * count];
    let (mut inputs, mut sizes) = (Vec::new(), Vec::new());
    for range in groups.ranges() {
        for row in range.clone() {
            indices[groups.assignments()[row]] = Some(inputs.len() + row - range.start);
        }
        let size = range.len().max(1);
        inputs.extend(of_row[range].iter().copied().chain([0]).take(size));
        sizes.push(size);
    }
    let ids = |ids: Vec<usize>| {
        let ids: Vec<i64> = ids.into_iter().map(|id| id as i64).collect();
        let size = ids.len();
        Tensor::<1, Int>::from_data(TensorData::new(ids, [size]), &device)
    };
    let indices = indices.into_iter().map(|index| index.unwrap_or(inputs.len())).collect();
    let rows = x.select(0, ids(inputs));
    let mut start = 0;
    let mut outputs: Vec<_> = experts
        .iter()
        .zip(sizes)
        .map(|(expert, size)| {
            let of_expert = rows.clone().narrow(0, start, size);
            start += size;
            expert.forward(of_expert)
        })
        .collect();
    if groups.rows() < tokens * count {
        outputs.push(outputs[0].clone().narrow(0, 0, 1).zeros_like());
    }
    let outputs = Tensor::cat(outputs, 0).select(0, ids(indices));
    let weights = weights.reshape([tokens * count, 1]).cast(outputs.dtype());
    let weighted = outputs * weights;
    weighted.reshape([tokens, count, width]).sum_dim(1).reshape([tokens, width])
}
