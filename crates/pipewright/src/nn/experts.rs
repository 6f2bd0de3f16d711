//! A mixture of experts: each token goes through the experts that its router chose.
//!
//! On the CPU back end the tokens are sorted by expert, so that each expert is a product over its own tokens. The weight
//! gradients of the experts can be deferred. The gradient of an expert that no token chose is zero: it is not absent,
//! because an optimizer changes parameters with a zero gradient (momentum, weight decay) and skips those without one.

use burn::module::{Module, ParamId};
use burn::tensor::{Int, Tensor, TensorData};

use super::bundle::{Bundle, Slots};
use super::deferred::{Deferred, KeptWeight, WeightTask, recorded_on};
use super::linear::Linear;
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, from_cpu, on_cpu};
use super::relu_squared::relu_squared;
use super::routing::Routing;
use super::swiglu::swiglu;
use pipewright_kernel::grouped::{Groups, row_products, scale_rows};
use pipewright_kernel::product::{Matrix, product};

/// A feed-forward layer: `down(silu(gate(x)) * up(x))` with a gate, `down(max(up(x), 0)²)` without. Its layers have no
/// bias.
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
    fn layers(&self) -> Vec<&Linear> {
        self.gate_proj.iter().chain([&self.up_proj, &self.down_proj]).collect()
    }

    /// Shapes: `[tokens, width]` in and out.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let up = self.up_proj.forward(x.clone());
        self.down_proj.forward(match &self.gate_proj {
            Some(gate) => swiglu(gate.forward(x), up),
            None => relu_squared(up),
        })
    }
}

/// Returns, for each token, the sum over its chosen experts of `weight * expert(x)`.
///
/// Shapes: `x [tokens, width]`, result `[tokens, width]`.
///
/// # Panics
/// When the routing is of another number of experts, or as [`mix_chosen`].
pub fn mix_experts(x: Tensor<2>, routing: &Routing, experts: &[Expert]) -> Tensor<2> {
    assert_eq!(routing.experts(), experts.len(), "the routing is of these experts");
    mix_chosen(x, routing.weights(), routing.chosen(), experts)
}

/// As [`mix_experts`], for a router of one's own: `chosen` are the experts of each token, one after the other, and
/// `weights` `[tokens, choices of a token]` their weights.
///
/// # Panics
/// When weights and choices are not of the tokens, a choice is not of an expert, or an expert has a bias or a form or
/// shape that differs from the first one's.
pub fn mix_chosen(x: Tensor<2>, weights: Tensor<2>, chosen: &[usize], experts: &[Expert]) -> Tensor<2> {
    let [tokens, width] = x.dims();
    let [routed, count] = weights.dims();
    assert_eq!((routed, chosen.len()), (tokens, tokens * count), "the choices are of these tokens");
    assert!(chosen.iter().all(|&choice| choice < experts.len()), "each choice is of one of the experts");
    let inner = check_experts(experts, width);
    let groups = Groups::new(chosen, experts.len(), count);
    let Some(matrices) = Matrices::new(experts) else { return composed(x, weights, experts, &groups) };
    let (token, deferred) = matrices.token(experts);
    let inputs = [x.clone().into_dispatch(), weights.clone().into_dispatch(), token.into_dispatch()];
    let Some(([x, weights, _], tape)) = on_cpu(inputs) else { return composed(x, weights, experts, &groups) };
    let tape = recorded_on(tape, 2, deferred.as_ref());

    let sorted: Vec<f32> = groups.assignments().iter().map(|&place| elements(&weights)[place]).collect();
    let held = matrices.held.iter().map(|held| held.value.clone()).collect::<Vec<_>>();
    let parts = Parts::new(&held, matrices.parts);
    let rows = groups.gather(elements(&x), width);
    let gate = parts.gates.as_ref().map(|gates| groups.product(&rows, gates, [width, inner], false));
    let up = groups.product(&rows, &parts.ups, [width, inner], false);
    let activated = match &gate {
        Some(gate) => pipewright_kernel::swiglu::forward(gate, &up),
        None => pipewright_kernel::relu_squared::forward(&up),
    };
    let out = groups.product(&activated, &parts.downs, [inner, width], false);
    let out = groups.scatter(&out, Some(&sorted), width);
    tape.record(out, [tokens, width], |_| ExpertsBackward {
        sizes: [tokens, width, inner],
        count,
        x,
        weights: sorted,
        gate,
        up,
        activated,
        groups,
        matrices: matrices.kept(),
    })
}

/// Checks that the experts are alike, and returns their inner width.
fn check_experts(experts: &[Expert], width: usize) -> usize {
    let [_, inner] = experts[0].up_proj.weight.dims();
    let has_gate = experts[0].gate_proj.is_some();
    for expert in experts {
        let mut shapes = vec![[width, inner]; if has_gate { 2 } else { 1 }];
        shapes.push([inner, width]);
        let found: Vec<_> = expert.layers().iter().map(|layer| layer.weight.dims()).collect();
        assert!(found == shapes && has_gate == expert.gate_proj.is_some(), "the experts have one shape");
        assert!(
            expert.layers().iter().all(|layer| layer.bias.is_none()),
            "the layers of an expert have no bias"
        );
    }
    inner
}

/// The matrices of all experts by their part.
struct Parts<'a> {
    gates: Option<Vec<&'a [f32]>>,
    ups: Vec<&'a [f32]>,
    downs: Vec<&'a [f32]>,
}

impl<'a> Parts<'a> {
    /// `held` are the matrices of the first expert, of the second, and so on, `parts` each.
    fn new(held: &'a [CpuTensor], parts: usize) -> Self {
        let part = |part: usize| held.iter().skip(part).step_by(parts).map(elements).collect();
        Self { gates: (parts == 3).then(|| part(0)), ups: part(parts - 2), downs: part(parts - 1) }
    }
}

/// The matrices of all experts.
struct Matrices {
    /// The layers of the first expert, of the second, and so on.
    held: Vec<HeldMatrix>,
    /// The number of layers of an expert.
    parts: usize,
    /// The matrices whose gradients are computed on the tape, at the places of `held`.
    bundle: Bundle,
}

struct HeldMatrix {
    id: ParamId,
    value: CpuTensor,
    gradient: Gradient,
}

/// When the gradient of a matrix is computed.
#[derive(Clone, Debug)]
enum Gradient {
    Later(Deferred),
    OnTape,
    Never,
}

impl Gradient {
    fn deferred(&self) -> Option<&Deferred> {
        match self {
            Self::Later(deferred) => Some(deferred),
            Self::OnTape | Self::Never => None,
        }
    }
}

impl Matrices {
    /// Returns `None` if a matrix is not of the CPU back end in single precision.
    fn new(experts: &[Expert]) -> Option<Self> {
        let parts = experts[0].layers().len();
        let mut held = Vec::with_capacity(parts * experts.len());
        let mut bundle = Bundle::new();
        for layer in experts.iter().flat_map(Expert::layers) {
            let (weight, id) = (layer.weight.val(), layer.weight.id);
            let ([value], _) = on_cpu([weight.clone().into_dispatch()])?;
            let gradient = match Deferred::current(&weight, id) {
                Some(deferred) => Gradient::Later(deferred),
                None if weight.is_tracked() => Gradient::OnTape,
                None => Gradient::Never,
            };
            if matches!(gradient, Gradient::OnTape) {
                bundle.add(held.len(), weight);
            }
            held.push(HeldMatrix { id, value, gradient });
        }
        Some(Self { held, parts, bundle })
    }

    /// Returns the tensor through which the tape reaches the matrices: the token of those on the tape. If there are none,
    /// it is a matrix whose gradient is deferred, with its collector; the tape then gets no gradient of it.
    fn token(&self, experts: &[Expert]) -> (Tensor<1>, Option<Deferred>) {
        let is_deferred = |held: &HeldMatrix| held.gradient.deferred().is_some();
        match self.held.iter().position(is_deferred).filter(|_| !self.bundle.token.is_tracked()) {
            Some(place) => {
                let matrix = experts[place / self.parts].layers()[place % self.parts].weight.val();
                let token = Tensor::from_dispatch(matrix.into_dispatch());
                (token, self.held[place].gradient.deferred().cloned())
            }
            None => (self.bundle.token.clone(), None),
        }
    }

    /// Returns the matrices as the backward pass keeps them.
    fn kept(self) -> KeptMatrices {
        let keep = |HeldMatrix { id, value, gradient }| KeptMatrix {
            id,
            weight: KeptWeight::new(from_cpu(value), id, gradient.deferred()),
            gradient,
        };
        let slots = self.bundle.token.is_tracked().then_some(self.bundle.slots);
        KeptMatrices { kept: self.held.into_iter().map(keep).collect(), parts: self.parts, slots }
    }
}

#[derive(Clone, Debug)]
struct KeptMatrices {
    kept: Vec<KeptMatrix>,
    parts: usize,
    /// For the gradients on the tape, if there are any.
    slots: Option<Slots>,
}

#[derive(Clone, Debug)]
struct KeptMatrix {
    id: ParamId,
    weight: KeptWeight,
    gradient: Gradient,
}

#[derive(Clone, Debug)]
struct ExpertsBackward {
    /// Tokens, width, inner width.
    sizes: [usize; 3],
    /// The number of choices of a token.
    count: usize,
    x: CpuTensor,
    /// The weight of each sorted row.
    weights: Vec<f32>,
    gate: Option<Vec<f32>>,
    up: Vec<f32>,
    activated: Vec<f32>,
    groups: Groups,
    matrices: KeptMatrices,
}

impl Operation<3> for ExpertsBackward {
    fn backward(
        self,
        gradient: CpuTensor,
        [for_x, for_weights, for_matrices]: [bool; 3],
    ) -> [Option<CpuTensor>; 3] {
        let Self { sizes: [tokens, width, inner], count, x, weights, gate, up, activated, groups, matrices } =
            self;
        let held: Vec<_> = matrices.kept.iter().map(|kept| kept.weight.get_on_cpu()).collect();
        let parts = Parts::new(&held, matrices.parts);
        let mut d_out = groups.gather(elements(&gradient), width);
        // The gradient of the activated rows, before the weight of the row.
        let mut d_activated = groups.product(&d_out, &parts.downs, [width, inner], true);
        let d_weights = for_weights.then(|| {
            let mut d_weights = vec![0.0; tokens * count];
            let products = row_products(&activated, &d_activated, inner);
            groups.assignments().iter().zip(products).for_each(|(&place, d)| d_weights[place] = d);
            cpu_tensor(d_weights, [tokens, count])
        });
        scale_rows(&mut d_activated, &weights, inner);
        let (d_gate, d_up) = match &gate {
            Some(gate) => {
                let (d_gate, d_up) = pipewright_kernel::swiglu::backward(gate, &up, &d_activated);
                (Some(d_gate), d_up)
            }
            None => (None, pipewright_kernel::relu_squared::backward(&up, &d_activated)),
        };
        drop((gate, up, d_activated));
        let d_x = for_x.then(|| {
            let mut d_rows = groups.product(&d_up, &parts.ups, [inner, width], true);
            if let (Some(d_gate), Some(gates)) = (&d_gate, &parts.gates) {
                groups.add_product(&mut d_rows, d_gate, gates, [inner, width], true);
            }
            cpu_tensor(groups.scatter(&d_rows, None, width), [tokens, width])
        });
        if for_matrices {
            scale_rows(&mut d_out, &weights, width);
            let rows = groups.rows();
            let x = cpu_tensor(groups.gather(elements(&x), width), [rows, width]);
            let of_inner = |elements| cpu_tensor(elements, [rows, inner]);
            let (activated, d_out) = (of_inner(activated), cpu_tensor(d_out, [rows, width]));
            let inputs = d_gate.into_iter().chain([d_up]).map(of_inner).map(|d| (x.clone(), d));
            matrices.differentiate(&groups, &inputs.chain([(activated, d_out)]).collect::<Vec<_>>());
        }
        // The token has a gradient, so that the tape goes on to the bundle, which takes the gradients out of the slots.
        let d_token = matrices.slots.filter(|_| for_matrices).map(|_| cpu_tensor(vec![0.0], [1]));
        [d_x, d_weights, d_token]
    }
}

impl KeptMatrices {
    /// Defers or computes the gradient of each matrix, from the inputs and output gradients of the parts.
    fn differentiate(&self, groups: &Groups, parts: &[(CpuTensor, CpuTensor)]) {
        for (expert, range) in groups.ranges().enumerate() {
            for (part, (x, gradient)) in parts.iter().enumerate() {
                let place = self.parts * expert + part;
                let kept = &self.kept[place];
                let [x, gradient] = [x, gradient].map(|rows| rows.narrow(0, range.start, range.len()));
                match (&kept.gradient, &self.slots) {
                    (Gradient::Later(deferred), _) => {
                        let (x, gradient) = (Box::new(from_cpu(x)), from_cpu(gradient));
                        deferred.push(WeightTask::Product { weight: kept.id, x, gradient });
                    }
                    (Gradient::OnTape, Some(slots)) => slots.fill(place, weight_gradient(&x, &gradient)),
                    _ => {}
                }
            }
        }
    }
}

/// `xᵀ gradient`.
fn weight_gradient(x: &CpuTensor, gradient: &CpuTensor) -> CpuTensor {
    let dims = |tensor: &CpuTensor| [tensor.layout().shape()[0], tensor.layout().shape()[1]];
    let ([rows, inputs], [_, outputs]) = (dims(x), dims(gradient));
    let x = Matrix::new(elements(x), rows, inputs);
    let gradient = Matrix::new(elements(gradient), rows, outputs);
    cpu_tensor(product(x.transposed(), gradient), [inputs, outputs])
}

/// The mixture of Burn's operations. An expert that no token chose computes the first token, and nobody uses its result:
/// so its parameters have a gradient, which is zero.
fn composed(x: Tensor<2>, weights: Tensor<2>, experts: &[Expert], groups: &Groups) -> Tensor<2> {
    let ([tokens, width], [_, count]) = (x.dims(), weights.dims());
    let device = x.device();
    let of_row: Vec<usize> = groups.tokens().collect();
    let mut places = vec![0; groups.rows()];
    let (mut inputs, mut sizes) = (Vec::new(), Vec::new());
    for range in groups.ranges() {
        for row in range.clone() {
            places[groups.assignments()[row]] = inputs.len() + row - range.start;
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
    let rows = x.select(0, ids(inputs));
    let mut start = 0;
    let outputs = experts.iter().zip(sizes).map(|(expert, size)| {
        let of_expert = rows.clone().narrow(0, start, size);
        start += size;
        expert.forward(of_expert)
    });
    let outputs = Tensor::cat(outputs.collect(), 0).select(0, ids(places));
    let weighted = outputs * weights.reshape([tokens * count, 1]);
    weighted.reshape([tokens, count, width]).sum_dim(1).reshape([tokens, width])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::backend::Flex;
    use burn::module::Param;
    use burn::tensor::{DType, Tolerance};

    use super::super::check::numbers;
    use super::super::operation::cpu;
    use super::*;

    const WIDTH: usize = 6;
    const INNER: usize = 5;

    /// The experts' weights, the inputs and the router's logits, in one precision.
    fn setup(tokens: usize, count: usize, gated: bool, dtype: DType) -> (Vec<Expert>, Tensor<2>, Tensor<2>) {
        let linear = |shape: [usize; 2], scale| {
            let weight = Param::from_tensor(numbers(shape, scale).cast(dtype).autodiff());
            Linear { weight, bias: None }
        };
        let expert = |number: usize| Expert {
            gate_proj: gated.then(|| linear([WIDTH, INNER], 1.0 + number as f32 / 10.0)),
            up_proj: linear([WIDTH, INNER], 0.5 + number as f32 / 5.0),
            down_proj: linear([INNER, WIDTH], 0.8),
        };
        let leaf = |shape, scale| numbers(shape, scale).cast(dtype).autodiff().require_grad();
        // The last expert's logits are so low that no token chooses it.
        let low = Tensor::<2>::from_data([[0.0, 0.0, 0.0, -50.0]], &x_device()).cast(dtype);
        let logits = (numbers([tokens, 4], 2.0).cast(dtype) + low).autodiff().require_grad();
        assert!(count < 4);
        ((0..4).map(expert).collect(), leaf([tokens, WIDTH], 1.0), logits)
    }

    fn x_device() -> burn::tensor::Device {
        burn::tensor::Device::flex()
    }

    fn backward(y: Tensor<2>) -> burn::tensor::Gradients {
        let upstream = (numbers(y.dims(), 1.0) + 0.3).cast(y.dtype()).autodiff();
        (y * upstream).sum().backward()
    }

    fn weights(experts: &[Expert]) -> impl Iterator<Item = (ParamId, Tensor<2>)> {
        experts.iter().flat_map(Expert::layers).map(|layer| (layer.weight.id, layer.weight.val()))
    }

    /// Returns the result, and the gradients of the inputs, of the logits, and of each matrix.
    fn run(tokens: usize, count: usize, gated: bool, dtype: DType) -> Vec<TensorData> {
        let (experts, x, logits) = setup(tokens, count, gated, dtype);
        let routing = Routing::new(logits.clone(), count, true);
        let y = mix_experts(x.clone(), &routing, &experts);
        let gradients = backward(y.clone());
        let gradient = |tensor: Tensor<2>| tensor.grad(&gradients).expect("a gradient").into_data();
        let inputs = [gradient(x), gradient(logits)];
        let matrices = weights(&experts).map(|(_, weight)| gradient(weight));
        let all = [y.into_data()].into_iter().chain(inputs).chain(matrices);
        all.map(|data| data.convert_dtype(DType::F32)).collect()
    }

    #[test]
    fn equals_its_composition_in_f64() {
        for (tokens, count, gated) in
            [(9, 2, true), (40, 1, true), (1, 3, true), (9, 2, false), (1, 1, false)]
        {
            let run = |dtype| run(tokens, count, gated, dtype);
            let (found, expected) = (run(DType::F32), run(DType::F64));
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                found.assert_approx_eq::<f32>(expected, Tolerance::rel_abs(2e-5, 2e-5));
            }
        }
    }

    #[test]
    fn an_expert_that_nobody_chose_has_the_gradient_zero() {
        for dtype in [DType::F32, DType::F64] {
            let found = run(9, 2, true, dtype);
            let unused = &found[found.len() - 3..];
            assert!(unused.iter().all(|gradient| gradient.iter::<f32>().all(|x| x == 0.0)), "{unused:?}");
        }
    }

    #[test]
    fn inside_a_collector_the_weight_gradients_wait() {
        let (experts, x, logits) = setup(9, 2, true, DType::F32);
        let ids = weights(&experts).map(|(id, _)| id).collect();
        let deferred = Deferred::new(Arc::new(ids));
        let y = deferred.collect(|| mix_experts(x.clone(), &Routing::new(logits.clone(), 2, true), &experts));
        let gradients = backward(y);
        assert!(x.grad(&gradients).is_some() && logits.grad(&gradients).is_some());
        assert!(weights(&experts).all(|(_, weight)| weight.grad(&gradients).is_none()));

        let tasks = deferred.take();
        let expected = &run(9, 2, true, DType::F32)[3..];
        assert_eq!(tasks.len(), expected.len());
        for ((task, expected), (id, _)) in tasks.iter().zip(expected).zip(weights(&experts)) {
            let WeightTask::Product { weight, x, gradient } = task else { panic!("{task:?}") };
            assert_eq!(*weight, id);
            let [x, gradient] = [x.as_ref(), gradient].map(|rows| cpu(rows.clone()).expect("on the CPU"));
            let found = Tensor::<2>::from_primitive::<Flex>(weight_gradient(&x, &gradient));
            assert_eq!(found.into_data(), *expected);
        }
    }

    #[test]
    fn frozen_experts_pass_gradients_on() {
        let (experts, x, logits) = setup(9, 2, true, DType::F32);
        let experts: Vec<_> = experts.into_iter().map(Module::no_grad).collect();
        let gradients = backward(mix_experts(x.clone(), &Routing::new(logits.clone(), 2, true), &experts));
        let found = [x, logits].map(|leaf| leaf.grad(&gradients).expect("a gradient").into_data());
        assert_eq!(found.as_slice(), &run(9, 2, true, DType::F32)[1..3]);
    }
}
