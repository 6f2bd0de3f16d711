//! A mixture of experts: each token goes through the experts that its router chose.
//!
//! On the CPU back end the tokens are sorted by expert, so that each expert is a product over its own tokens
//! (`expert_mixture.rs`). If the expert has a bias, the product is added to rows of the bias. The weight
//! gradients of the experts can be deferred. The gradient of an expert that no token chose is zero: it is not
//! absent, because an optimizer changes parameters with a zero gradient (momentum, weight decay) and skips
//! those without one.

use burn::tensor::{Tensor, bf16};
use pipewright_kernel::grouped::Groups;

use super::deferred::recorded_on;
use super::expert::{Expert, ExpertActivation, composed};
use super::expert_exchange::{Arrived, Sorted};
use super::expert_low_rank::LowRankExperts;
use super::expert_matrices::Matrices;
use super::expert_mixture::Mixture;
use super::expert_parallel::ExpertParallel;
use super::operation::{are_multiplied_in_bf16, elements, on_cpu};
use super::routing::Routing;
use super::table_rows::{RowChoice, rows_of};

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

/// Like [`mix_experts`], but for another router: `chosen` has the experts of each token, one token after the
/// other, and `weights` `[tokens, choices of a token]` their weights.
///
/// # Panics
/// When there are no experts, weights and choices are not of the tokens, a choice is not of an expert, an
/// expert has a shape or a form that differs from the first one's, or an expert without a gate has
/// [`ExpertActivation::Clamped`].
pub fn mix_chosen(x: Tensor<2>, weights: Tensor<2>, chosen: &[usize], experts: &[Expert]) -> Tensor<2> {
    mix(x, weights, chosen, &experts.iter().map(Some).collect::<Vec<_>>(), &ExpertParallel::default())
}

/// Like [`mix_chosen`], but for a rank that holds some of the experts; the entries of the others are `None`.
///
/// If several replicas hold the experts together, tokens are sent to the replicas of their experts and back,
/// and the result is the mixture. The experts then have neither biases nor bounds, and all tensors are in
/// single or half precision on the processor.
///
/// Otherwise a choice of an expert that the rank does not hold adds nothing, and the sum over the ranks of a
/// tensor group is the mixture ([`TensorParallel::experts`](super::TensorParallel::experts)).
///
/// # Panics
/// When the rank holds no expert, the replicas cannot exchange tokens, a replica of the group fails, or as
/// [`mix_chosen`].
pub fn mix_held(
    x: Tensor<2>,
    weights: Tensor<2>,
    chosen: &[usize],
    experts: &[Option<Expert>],
    replicas: &ExpertParallel,
) -> Tensor<2> {
    mix(x, weights, chosen, &experts.iter().map(Option::as_ref).collect::<Vec<_>>(), replicas)
}

fn mix(
    x: Tensor<2>,
    weights: Tensor<2>,
    chosen: &[usize],
    experts: &[Option<&Expert>],
    replicas: &ExpertParallel,
) -> Tensor<2> {
    let held: Vec<&Expert> = experts.iter().copied().flatten().collect();
    assert!(!held.is_empty(), "a mixture has experts");
    let [tokens, width] = x.dims();
    let [routed, count] = weights.dims();
    assert_eq!((routed, chosen.len()), (tokens, tokens * count), "the choices are of these tokens");
    assert!(chosen.iter().all(|&choice| choice < experts.len()), "each choice is of one of the experts");
    let inner = check_experts(&held, width);
    let link = replicas.link();
    let groups = match link {
        Some(_) => Groups::new(chosen, experts.len(), count),
        None => groups(chosen, experts, count),
    };
    let composed = |x, weights| {
        assert!(link.is_none(), "experts whose tokens are sent are on the processor");
        composed(x, weights, &held, &groups)
    };
    let layers: Vec<_> = held.iter().flat_map(|expert| expert.layers()).collect();
    let Some(matrices) = Matrices::new(&layers, layers.len() / held.len(), x.dtype()) else {
        return composed(x, weights);
    };
    let form = held[0].form;
    let is_plain = !matrices.biases.exist() && form.activation == ExpertActivation::Usual;
    assert!(link.is_none() || is_plain, "experts whose tokens are sent have neither biases nor bounds");
    let (mut token, mut deferred) = matrices.token(&layers);
    let mut adapters = None;
    if held[0].adapter.is_some() {
        let is_frozen = !token.is_tracked() && deferred.is_none();
        let Some(found) = LowRankExperts::of(&held).filter(|_| is_frozen) else {
            return composed(x, weights);
        };
        (token, deferred) = found.token();
        adapters = Some(found);
    }
    let inputs =
        |x: Tensor<2>| [x.into_dispatch(), weights.clone().into_dispatch(), token.clone().into_dispatch()];
    let Some(([rows, factors, _], mut tape)) = on_cpu(inputs(x.clone())) else {
        return composed(x, weights.clone());
    };
    let sorted: Vec<f32> = {
        let weights = elements(&factors);
        groups.assignments().iter().map(|&index| weights[index]).collect()
    };
    let arrived = link.map(|link| {
        let is_tracked = x.is_tracked() || weights.is_tracked() || token.is_tracked();
        let tokens: Vec<usize> = groups.tokens().collect();
        let gathered = rows_of(&rows, &RowChoice::all(&tokens), width);
        let own = Sorted { groups: &groups, rows: gathered, weights: &sorted, is_tracked };
        let arrived = Arrived::exchange(link, replicas, own);
        if arrived.is_tracked && !is_tracked {
            // The trained parameters are on other replicas, such as the experts that are not frozen. This
            // replica takes part in their backward.
            let leaf = x.clone().detach().require_grad();
            let on_tape = on_cpu(inputs(leaf)).expect("the same tensors were on the processor");
            tape = on_tape.1;
        }
        arrived
    });
    let tape = recorded_on(tape, 2, deferred.as_ref());
    let sizes = [tokens, width, inner];
    let mixture = Mixture { sizes, count, form, x: rows, weights: sorted, groups, arrived };
    let operands = matrices.held.iter().filter_map(|held| held.value.tensor()).chain([&mixture.x]);
    if are_multiplied_in_bf16(operands) {
        mixture.forward::<bf16>(matrices, adapters, tape)
    } else {
        mixture.forward::<f32>(matrices, adapters, tape)
    }
}

/// Groups the choices of the experts that this rank holds; each token has `count` choices.
fn groups(chosen: &[usize], experts: &[Option<&Expert>], count: usize) -> Groups {
    let mut indices = 0..;
    let indices: Vec<_> = experts.iter().map(|expert| expert.and_then(|_| indices.next())).collect();
    Groups::among(chosen, &indices, count)
}

/// Checks that the experts are alike, and returns their inner width.
fn check_experts(experts: &[&Expert], width: usize) -> usize {
    let [_, inner] = experts[0].up_proj.form().dims();
    let has_gate = experts[0].gate_proj.is_some();
    for expert in experts {
        let mut shapes = vec![[width, inner]; if has_gate { 2 } else { 1 }];
        shapes.push([inner, width]);
        let found: Vec<_> = expert.layers().iter().map(|layer| layer.form().dims()).collect();
        assert!(found == shapes && has_gate == expert.gate_proj.is_some(), "the experts have one shape");
        assert!(expert.form == experts[0].form, "the experts have one form");
        let is_usual = expert.form.activation == ExpertActivation::Usual;
        assert!(has_gate || is_usual, "an expert without a gate has no bounds");
    }
    inner
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::backend::Flex;
    use burn::module::{Module, Param, ParamId};
    use burn::tensor::{DType, TensorData, Tolerance};

    use super::super::check::numbers;
    use super::super::deferred::{Deferred, WeightTask};
    use super::super::expert::{ExpertAdapter, ExpertForm};
    use super::super::expert_matrices::weight_gradient;
    use super::super::held_matrix::HeldLinear;
    use super::super::linear::Linear;
    use super::super::operation::cpu;
    use super::*;

    const WIDTH: usize = 6;
    const INNER: usize = 5;

    /// The parts of the experts.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Kind {
        Gated,
        Ungated,
        /// With biases and bounds, on one of two ranks.
        Clamped,
    }

    /// Returns the experts' weights, the inputs and the router's logits, in one precision.
    fn setup(tokens: usize, count: usize, kind: Kind, dtype: DType) -> (Vec<Expert>, Tensor<2>, Tensor<2>) {
        let linear = |shape: [usize; 2], scale| {
            let weight = Param::from_tensor(numbers(shape, scale).cast(dtype).autodiff());
            let bias = || Param::from_tensor(numbers([shape[1]], scale).cast(dtype).autodiff());
            Linear { weight, bias: (kind == Kind::Clamped).then(bias) }
        };
        let form = match kind {
            Kind::Clamped => {
                let activation = ExpertActivation::Clamped { alpha: 1.7, limit: 0.8 };
                ExpertForm { activation, bias_share: 0.5 }
            }
            Kind::Gated | Kind::Ungated => ExpertForm::default(),
        };
        let expert = |number: usize| Expert {
            gate_proj: (kind != Kind::Ungated)
                .then(|| linear([WIDTH, INNER], 1.0 + number as f32 / 10.0).into()),
            up_proj: linear([WIDTH, INNER], 0.5 + number as f32 / 5.0).into(),
            down_proj: linear([INNER, WIDTH], 0.8).into(),
            adapter: None,
            form,
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
        let parameters = experts.iter().flat_map(Expert::layers).filter_map(|layer| layer.weight.as_ref());
        parameters.map(|parameter| (parameter.id, parameter.val()))
    }

    fn biases(experts: &[Expert]) -> impl Iterator<Item = Tensor<1>> {
        experts.iter().flat_map(Expert::layers).filter_map(|layer| Some(layer.bias.as_ref()?.val()))
    }

    /// Returns the result, and the gradients of the inputs, of the logits, of each matrix, and of each bias.
    fn run(tokens: usize, count: usize, kind: Kind, dtype: DType) -> Vec<TensorData> {
        run_with((tokens, count, kind, dtype), mix_experts)
    }

    /// Like [`run`], but with `mix` instead of [`mix_experts`].
    fn run_with(
        (tokens, count, kind, dtype): (usize, usize, Kind, DType),
        mix: impl Fn(Tensor<2>, &Routing, &[Expert]) -> Tensor<2>,
    ) -> Vec<TensorData> {
        let (experts, x, logits) = setup(tokens, count, kind, dtype);
        let routing = Routing::new(logits.clone(), count, true);
        let y = mix(x.clone(), &routing, &experts);
        let gradients = backward(y.clone());
        let gradient = |tensor: Tensor<2>| tensor.grad(&gradients).expect("a gradient").into_data();
        let inputs = [gradient(x), gradient(logits)];
        let matrices = weights(&experts).map(|(_, weight)| gradient(weight));
        let biases = biases(&experts).map(|bias| bias.grad(&gradients).expect("a gradient").into_data());
        let all = [y.into_data()].into_iter().chain(inputs).chain(matrices).chain(biases);
        all.map(|data| data.convert_dtype(DType::F32)).collect()
    }

    #[test]
    fn equals_its_composition_in_f64() {
        use Kind::{Clamped, Gated, Ungated};
        for (tokens, count, kind) in [
            (9, 2, Gated),
            (40, 1, Gated),
            (1, 3, Gated),
            (9, 2, Ungated),
            (1, 1, Ungated),
            (9, 2, Clamped),
            (40, 1, Clamped),
            (1, 3, Clamped),
        ] {
            let run = |dtype| run(tokens, count, kind, dtype);
            assert_close(&run(DType::F32), &run(DType::F64));
        }
    }

    fn assert_close(found: &[TensorData], expected: &[TensorData]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            found.assert_approx_eq::<f32>(expected, Tolerance::rel_abs(2e-5, 2e-5));
        }
    }

    #[test]
    fn the_mixtures_of_parts_of_the_experts_add_up() {
        let held = |experts: &[Expert], held: std::ops::Range<usize>| -> Vec<Option<Expert>> {
            let hold = |(index, expert): (usize, &Expert)| held.contains(&index).then(|| expert.clone());
            experts.iter().enumerate().map(hold).collect()
        };
        for (dtype, kind) in [
            (DType::F32, Kind::Gated),
            (DType::F32, Kind::Ungated),
            (DType::F32, Kind::Clamped),
            (DType::F64, Kind::Gated),
            (DType::F64, Kind::Clamped),
        ] {
            // No token chooses the last expert, so the last part has no rows.
            let found = run_with((9, 2, kind, dtype), |x, routing, experts| {
                let part = |part| {
                    mix_held(
                        x.clone(),
                        routing.weights(),
                        routing.chosen(),
                        &held(experts, part),
                        &ExpertParallel::default(),
                    )
                };
                part(0..1) + part(1..3) + part(3..4)
            });
            assert_close(&found, &run(9, 2, kind, DType::F64));
        }
    }

    #[test]
    fn an_expert_that_no_token_chose_has_the_gradient_zero() {
        for dtype in [DType::F32, DType::F64] {
            for kind in [Kind::Gated, Kind::Clamped] {
                // The gradients of the matrices of all experts begin at the fourth entry.
                let found = run(9, 2, kind, dtype);
                let unused = found[12..15].iter().chain(&found[found.len() - 3..]);
                unused.for_each(|gradient| assert!(gradient.iter::<f32>().all(|x| x == 0.0), "{gradient:?}"));
            }
        }
    }

    /// Returns experts whose own matrices are frozen, with adapters of gate and up, of down, or of both. Up may have a first
    /// matrix of its own.
    fn adapted([enters, leaves, is_own]: [bool; 3]) -> Vec<Expert> {
        let matrix = |shape: [usize; 2], scale| {
            HeldLinear::from(Linear {
                weight: Param::from_tensor(numbers(shape, scale).autodiff()),
                bias: None,
            })
        };
        let (experts, ..) = setup(1, 1, Kind::Gated, DType::F32);
        let with_adapter = |(index, expert): (usize, Expert)| {
            let scale = 0.3 + index as f32 / 10.0;
            let second = |scale| enters.then(|| matrix([2, INNER], scale));
            let adapter = ExpertAdapter {
                enter: enters.then(|| matrix([WIDTH, 2], scale)),
                gate: second(0.7 * scale),
                up: second(0.4 * scale),
                enter_up: (enters && is_own).then(|| matrix([WIDTH, 2], 0.8 * scale)),
                down: leaves.then(|| [matrix([INNER, 2], scale), matrix([2, WIDTH], 0.6 * scale)]),
                scale: 1.5,
            };
            Expert { adapter: Some(adapter), ..expert.no_grad() }
        };
        experts.into_iter().enumerate().map(with_adapter).collect()
    }

    #[test]
    fn adapters_equal_their_composition() {
        for parts in [[true, true, false], [true, false, false], [false, true, false], [true, true, true]] {
            let run = |mix: &dyn Fn(Tensor<2>, &Routing, &[Expert]) -> Tensor<2>| {
                let (_, x, logits) = setup(9, 2, Kind::Gated, DType::F32);
                let (experts, routing) = (adapted(parts), Routing::new(logits.clone(), 2, true));
                let y = mix(x.clone(), &routing, &experts);
                let gradients = backward(y.clone());
                let gradient = |tensor: Tensor<2>| tensor.grad(&gradients).expect("a gradient").into_data();
                assert!(weights(&experts).all(|(_, weight)| weight.grad(&gradients).is_none()));
                let adapters = experts.iter().filter_map(|expert| expert.adapter.as_ref());
                let matrices = adapters.flat_map(|adapter| adapter.layers());
                let matrices = matrices.map(|layer| layer.weight.as_ref().expect("a parameter").val());
                [y.into_data(), gradient(x), gradient(logits)]
                    .into_iter()
                    .chain(matrices.map(gradient))
                    .collect::<Vec<_>>()
            };
            let expected = run(&|x, routing, experts| {
                let held: Vec<&Expert> = experts.iter().collect();
                let some: Vec<_> = experts.iter().map(Some).collect();
                composed(x, routing.weights(), &held, &groups(routing.chosen(), &some, 2))
            });
            let found = run(&|x, routing, experts| mix_experts(x, routing, experts));
            let of_expert =
                parts.iter().zip([3, 2, 1]).map(|(is_there, count)| usize::from(*is_there) * count);
            assert_eq!(found.len(), 3 + 4 * of_expert.sum::<usize>());
            assert_close(&found, &expected);
        }
    }

    #[test]
    fn inside_a_collector_the_weight_gradients_wait() {
        for kind in [Kind::Gated, Kind::Clamped] {
            let (experts, x, logits) = setup(9, 2, kind, DType::F32);
            let ids = weights(&experts).map(|(id, _)| id).collect();
            let deferred = Deferred::new(Arc::new(ids));
            let routing = Routing::new(logits.clone(), 2, true);
            let y = deferred.collect(|| mix_experts(x.clone(), &routing, &experts));
            let gradients = backward(y);
            assert!(x.grad(&gradients).is_some() && logits.grad(&gradients).is_some());
            assert!(weights(&experts).all(|(_, weight)| weight.grad(&gradients).is_none()));

            let tasks = deferred.take();
            let expected = run(9, 2, kind, DType::F32);
            let (of_weights, of_biases) = expected[3..].split_at(12);
            assert_eq!(tasks.len(), of_weights.len());
            for ((task, expected), (id, _)) in tasks.iter().zip(of_weights).zip(weights(&experts)) {
                let WeightTask::Product { weight, x, gradient, .. } = task else { panic!("{task:?}") };
                assert_eq!(*weight, id);
                let [x, gradient] = [x.as_ref(), gradient].map(|rows| cpu(rows.clone()).expect("on the CPU"));
                let found = Tensor::<2>::from_primitive::<Flex>(weight_gradient(&x, &gradient));
                assert_eq!(found.into_data(), *expected);
            }
            // Gradients of biases do not wait.
            let found: Vec<TensorData> =
                biases(&experts).map(|bias| bias.grad(&gradients).expect("a gradient").into_data()).collect();
            assert_eq!(found, of_biases);
        }
    }

    #[test]
    fn frozen_experts_pass_gradients_on() {
        for kind in [Kind::Gated, Kind::Clamped] {
            let (experts, x, logits) = setup(9, 2, kind, DType::F32);
            let experts: Vec<_> = experts.into_iter().map(Module::no_grad).collect();
            let routing = Routing::new(logits.clone(), 2, true);
            let gradients = backward(mix_experts(x.clone(), &routing, &experts));
            let found = [x, logits].map(|leaf| leaf.grad(&gradients).expect("a gradient").into_data());
            assert_eq!(found.as_slice(), &run(9, 2, kind, DType::F32)[1..3]);
        }
    }
}
