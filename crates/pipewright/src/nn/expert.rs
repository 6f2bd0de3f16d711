//! One expert of a mixture, and mixtures composed of Burn's operations.

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData};
use pipewright_kernel::grouped::Groups;

use super::adapted_product::{LowRank, adapted_product_in};
use super::bias::add_share;
use super::clamped_gate::clamped_gate;
use super::composed::at_least_single;
use super::held_matrix::HeldLinear;
use super::parallel::TensorParallel;
use super::region::Region;
use super::relu_squared::relu_squared;
use super::swiglu::swiglu;

/// The function between the layers of an expert, and the share of its last bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertForm {
    /// The function.
    pub activation: ExpertActivation,
    /// The factor of the last layer's bias: 1 divided by the number of ranks that compute the expert
    /// together, because their results are added.
    pub bias_share: f64,
}

impl Default for ExpertForm {
    fn default() -> Self {
        Self { activation: ExpertActivation::Usual, bias_share: 1.0 }
    }
}

/// The function between the layers of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) * up` with a gate, `max(up, 0)²` without.
    Usual,
    /// `(up + 1) gate sigmoid(alpha gate)`, where the gate is at most `limit`, and `up` is between `-limit`
    /// and `limit` (OpenAI, 2025, <https://arxiv.org/abs/2508.10925>). The expert must have a gate.
    Clamped {
        /// The factor of the gate in the sigmoid.
        alpha: f64,
        /// The bound of the gate and of `up`.
        limit: f64,
    },
}

/// A feed-forward layer: `down(activation(gate(x), up(x)))` with a gate, `down(activation(up(x)))` without.
#[derive(Module, Debug)]
pub struct Expert {
    /// Weight `[width, inner]`.
    pub gate_proj: Option<HeldLinear>,
    /// Weight `[width, inner]`.
    pub up_proj: HeldLinear,
    /// Weight `[inner, width]`.
    pub down_proj: HeldLinear,
    /// The adapters of the layers, whose own matrices are frozen then.
    pub adapter: Option<ExpertAdapter>,
    /// The function between the layers.
    #[module(skip)]
    pub form: ExpertForm,
}

/// The low-rank adapters of the layers of an expert without biases.
#[derive(Module, Debug)]
pub struct ExpertAdapter {
    /// The first matrix of the gate, and of `up` if it has none of its own, `[width, rank]`.
    pub enter: Option<HeldLinear>,
    /// The second matrix of the gate, `[rank, inner]`.
    pub gate: Option<HeldLinear>,
    /// The second matrix of `up`, `[rank, inner]`.
    pub up: Option<HeldLinear>,
    /// The first matrix of `up`, `[width, rank]`.
    pub enter_up: Option<HeldLinear>,
    /// Both matrices of `down`, `[inner, rank]` and `[rank, width]`.
    pub down: Option<[HeldLinear; 2]>,
    /// The factor of the adapters' outputs.
    #[module(skip)]
    pub scale: f64,
}

impl ExpertAdapter {
    /// Returns the matrices: of gate and up, and of down.
    pub(super) fn layers(&self) -> Vec<&HeldLinear> {
        let enter = self.enter.iter().chain(&self.gate).chain(&self.up).chain(&self.enter_up);
        enter.chain(self.down.iter().flatten()).collect()
    }

    /// Returns `x w + scale * x first second`.
    fn add(&self, layer: &HeldLinear, x: Tensor<2>, matrices: Option<[&HeldLinear; 2]>) -> Tensor<2> {
        let Some([first, second]) = matrices else { return layer.forward(x) };
        assert!(layer.bias.is_none(), "an expert with adapters has no biases");
        let [a, b] = [first, second].map(|layer| layer.weight.as_ref().expect("adapters are parameters"));
        let low_rank = LowRank { first: a, second: b, scale: self.scale };
        adapted_product_in(&x, layer.form(), low_rank).unwrap_or_else(|| {
            let y = layer.forward(x.clone());
            let precision = y.dtype();
            y + second.forward(first.forward(at_least_single(x)) * self.scale).cast(precision)
        })
    }
}

impl Expert {
    /// Returns the gate, if there is one, and the layers up and down.
    pub(super) fn layers(&self) -> Vec<&HeldLinear> {
        self.gate_proj.iter().chain([&self.up_proj, &self.down_proj]).collect()
    }

    /// Returns the expert's result for each token. Shapes: `[tokens, width]` in and out.
    ///
    /// # Panics
    /// When the activation is [`ExpertActivation::Clamped`] and there is no gate.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        type Matrices<'a> = Option<(&'a HeldLinear, &'a HeldLinear)>;
        let enter = |layer: &HeldLinear, matrices: fn(&ExpertAdapter) -> Matrices<'_>| match &self.adapter {
            Some(adapter) => {
                let matrices = matrices(adapter).map(|(first, second)| [first, second]);
                adapter.add(layer, x.clone(), matrices)
            }
            None => layer.forward(x.clone()),
        };
        let up = enter(&self.up_proj, |adapter| {
            adapter.enter_up.as_ref().or(adapter.enter.as_ref()).zip(adapter.up.as_ref())
        });
        let gate = self.gate_proj.as_ref();
        let gate = gate.map(|gate| enter(gate, |adapter| adapter.enter.as_ref().zip(adapter.gate.as_ref())));
        let inner = match (gate, self.form.activation) {
            (Some(gate), ExpertActivation::Usual) => swiglu(gate, up),
            (Some(gate), ExpertActivation::Clamped { alpha, limit }) => {
                clamped_gate(gate, up, [alpha, limit])
            }
            (None, ExpertActivation::Usual) => relu_squared(up),
            (None, ExpertActivation::Clamped { .. }) => panic!("an expert without a gate has no bounds"),
        };
        if let Some(adapter) = &self.adapter {
            let matrices = adapter.down.as_ref().map(|[first, second]| [first, second]);
            return adapter.add(&self.down_proj, inner, matrices);
        }
        let share = self.form.bias_share;
        match &self.down_proj.bias {
            Some(bias) if share != 1.0 => {
                let whole = TensorParallel::default();
                let product = self.down_proj.form().linear(inner, None, &Region::of_whole(&whole));
                add_share(product, bias, share)
            }
            _ => self.down_proj.forward(inner),
        }
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

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::tensor::{Device, Tolerance};

    use super::super::check::numbers;
    use super::super::experts::mix_chosen;
    use super::super::linear::Linear;
    use super::*;

    #[test]
    fn clamped_gates_and_biases_follow_their_formula() {
        let linear = |shape: [usize; 2], scale: f32| Linear {
            weight: Param::from_tensor(numbers(shape, scale)),
            bias: Some(Param::from_tensor(numbers([shape[1]], 0.5))),
        };
        let form =
            ExpertForm { activation: ExpertActivation::Clamped { alpha: 1.5, limit: 0.6 }, bias_share: 0.5 };
        let expert = Expert {
            gate_proj: Some(linear([3, 4], 2.0).into()),
            up_proj: linear([3, 4], 1.5).into(),
            down_proj: linear([4, 3], 1.0).into(),
            adapter: None,
            form,
        };
        let x = numbers([5, 3], 1.0);
        let list = |x: Tensor<2>| x.into_data().iter::<f32>().collect::<Vec<_>>();
        let gate = list(expert.gate_proj.as_ref().expect("it has one").forward(x.clone()));
        let up = list(expert.up_proj.forward(x.clone()));
        assert!(gate.iter().any(|&gate| gate > 0.6) && up.iter().any(|&up| up < -0.6), "{gate:?} {up:?}");
        let inner: Vec<f32> = gate
            .iter()
            .zip(&up)
            .map(|(&gate, &up)| {
                let gate = gate.min(0.6);
                (up.clamp(-0.6, 0.6) + 1.0) * gate / (1.0 + (-1.5 * gate).exp())
            })
            .collect();
        let inner = Tensor::from_data(TensorData::new(inner, [5, 4]), &Device::flex());
        let down = &expert.down_proj;
        let bias = down.bias.as_ref().expect("it has one").val() * 0.5;
        let expected =
            (inner.matmul(down.weight.as_ref().expect("it has one").val()) + bias.unsqueeze()).into_data();
        let weights = Tensor::ones([5, 1], &Device::flex());
        let mixed = mix_chosen(x, weights, &[0; 5], &[expert]);
        mixed.into_data().assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-6));
    }

    #[test]
    #[should_panic(expected = "an expert without a gate has no bounds")]
    fn bounds_need_a_gate() {
        let linear =
            |shape: [usize; 2]| Linear { weight: Param::from_tensor(numbers(shape, 1.0)), bias: None };
        let activation = ExpertActivation::Clamped { alpha: 1.5, limit: 0.6 };
        let form = ExpertForm { activation, ..ExpertForm::default() };
        let [up_proj, down_proj] = [[3, 4], [4, 3]].map(|shape| linear(shape).into());
        let expert = Expert { gate_proj: None, up_proj, down_proj, adapter: None, form };
        let weights = Tensor::ones([5, 1], &Device::flex());
        mix_chosen(numbers([5, 3], 1.0), weights, &[0; 5], &[expert]);
    }
}
