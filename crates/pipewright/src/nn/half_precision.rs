//! Tests of all operations on tensors of half precision: each result is the rounded result of single
//! precision on the same numbers. The hand-written operations and the compositions are both tested; Burn's
//! tape with checkpointing has only the latter.

use std::ops::Range;
use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use pipewright_kernel::bf16_product::testing::run_without_instruction;

use super::check::numbers;
use super::{
    CausalAttention, DepthwiseConvolution, Embedding, Expert, GroupNormWeight, IGNORED_TARGET, Linear,
    Mamba2, MambaSizes, Relations, Routing, ScopedAttention, TiedHead, TokenScope, choice_loss,
    cross_entropy, mix_experts, relu_squared, rms_norm, router_losses, statistics_loss, swiglu,
    vocabulary_statistics,
};

/// The result of an operation and the gradients of its inputs.
struct Outcome {
    result: TensorData,
    gradients: Vec<TensorData>,
}

fn run<const N: usize>(
    inputs: &[Tensor<2>; N],
    dtype: DType,
    device: &Device,
    operation: &dyn Fn([Tensor<2>; N]) -> Tensor<2>,
) -> Outcome {
    let strategy = device.gradient_checkpointing_strategy().expect("a device with a tape");
    let on_tape = |x: Tensor<2>| x.autodiff().with_gradient_checkpointing_strategy(strategy);
    let leaves = inputs.clone().map(|input| on_tape(input.cast(dtype)).require_grad());
    let result = operation(leaves.clone());
    // Bfloat16 has fewer bits of mantissa than f16, which has these numbers too.
    let upstream = on_tape(numbers(result.dims(), 1.0).cast(DType::BF16).cast(DType::F32));
    let gradients = (result.clone().cast(DType::F32) * upstream).sum().backward();
    let gradient = |leaf: Tensor<2>| leaf.grad(&gradients).expect("each input is differentiated").into_data();
    Outcome { result: result.into_data(), gradients: leaves.map(gradient).into() }
}

/// The types of half precision.
const HALF: [DType; 2] = [DType::BF16, DType::F16];

/// The element type of a result.
#[derive(Clone, Copy, PartialEq)]
enum ResultType {
    /// The type of the inputs.
    Half,
    Single,
}

/// Checks an operation with this type of result.
fn check<const N: usize>(
    inputs: [Tensor<2>; N],
    result: ResultType,
    operation: impl Fn([Tensor<2>; N]) -> Tensor<2>,
) {
    let plain = Device::flex().autodiff();
    check_on(&[plain.clone(), plain.gradient_checkpointing()], inputs, result, operation);
}

fn check_on<const N: usize>(
    devices: &[Device],
    inputs: [Tensor<2>; N],
    result: ResultType,
    operation: impl Fn([Tensor<2>; N]) -> Tensor<2>,
) {
    let inputs = inputs.map(|input| input.cast(DType::BF16).cast(DType::F32));
    let expected = run(&inputs, DType::F32, &Device::flex().autodiff(), &operation);
    for (device, half) in devices.iter().flat_map(|device| HALF.map(|half| (device, half))) {
        let found = run(&inputs, half, device, &operation);
        assert_eq!(found.result.dtype(), if result == ResultType::Half { half } else { DType::F32 });
        assert!(found.gradients.iter().all(|gradient| gradient.dtype() == half));
        near(&found.result, &expected.result);
        found.gradients.iter().zip(&expected.gradients).for_each(|(found, expected)| near(found, expected));
    }
}

/// Checks that the error is small compared with the largest element.
fn near(found: &TensorData, expected: &TensorData) {
    let [found, expected]: [Vec<f32>; 2] = [found, expected].map(|data| data.iter().collect());
    let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 0.02 * largest, "{found} {expected} {largest}");
    }
}

fn parameter(tensor: Tensor<2>) -> Param<Tensor<2>> {
    Param::initialized(ParamId::new(), tensor)
}

fn linear(weight: Tensor<2>) -> Linear {
    Linear { weight: parameter(weight), bias: None }
}

#[test]
fn products_and_selections() {
    let (x, w) = (numbers([5, 32], 1.0), numbers([32, 7], 1.0));
    check([x.clone(), w.clone()], ResultType::Half, |[x, w]| linear(w).forward(x));
    check([x, w.transpose()], ResultType::Half, |[x, w]| TiedHead { weight: parameter(w) }.forward(x));
    check([numbers([4, 6], 1.0)], ResultType::Half, |[table]| {
        let ids = Tensor::<2, Int>::from_data([[3, 0, 3]], &Device::flex());
        Embedding { weight: parameter(table) }.forward(ids).reshape([3, 6])
    });
}

#[test]
fn norms_activations_and_attention() {
    // The mean of squares does not fit into bfloat16's mantissa.
    check([numbers([3, 300], 10.0), numbers([1, 300], 1.0)], ResultType::Half, |[x, weight]| {
        rms_norm(x, weight.reshape([300]), 1e-5)
    });
    check([numbers([4, 9], 2.0), numbers([4, 9], 1.0)], ResultType::Half, |[gate, up]| swiglu(gate, up));
    let attention = CausalAttention::rotary(70, 8, 100.0, &Device::flex());
    let rows = |width| numbers([70, width], 1.0);
    check([rows(16), rows(8), rows(8)], ResultType::Half, |[q, k, v]| attention.forward(q, k, v));
}

#[test]
fn losses_have_single_precision() {
    check([numbers([6, 20], 3.0)], ResultType::Single, |[logits]| {
        let targets = Tensor::<1, Int>::from_data([0, 19, 2, 1, 1, 3], &Device::flex());
        cross_entropy(logits, targets).unsqueeze()
    });
    check([numbers([6, 20], 3.0)], ResultType::Single, |[logits]| {
        let targets = || Tensor::<1, Int>::from_data([0, 19, 2, 1, 11, 3], &Device::flex());
        let part = |range: Range<usize>, earlier| {
            let own = logits.clone().narrow(1, range.start, range.len());
            vocabulary_statistics(own, targets(), (range, 20), earlier)
        };
        statistics_loss(part(12..20, Some(part(0..12, None))), targets()).unsqueeze()
    });
    check([numbers([7, 5], 3.0)], ResultType::Single, |[logits]| {
        Routing::new(logits, 2, true).balance_loss().unsqueeze()
    });
}

/// A loss, and the gradient of the leaf from which its logits are made.
fn loss_and_gradient(
    logits: &TensorData,
    loss: impl FnOnce(Tensor<2>) -> Tensor<1>,
) -> (TensorData, TensorData) {
    let leaf = Tensor::<2>::from_data(logits.clone(), (&Device::flex().autodiff(), DType::BF16));
    let leaf = leaf.require_grad();
    // A tensor that nothing else uses, as in a stage: the gradient takes its memory.
    let loss = loss(leaf.clone() * 2.0);
    let gradients = loss.clone().backward();
    (loss.inner().into_data(), leaf.grad(&gradients).expect("it is a leaf").into_data())
}

#[test]
fn losses_have_the_bits_that_a_copy_of_the_logits_in_single_precision_gives() {
    let targets = || Tensor::<1, Int>::from_data([0, 19, IGNORED_TARGET, 1, 11, 3], &Device::flex());
    let parts = |logits: Tensor<2>| {
        let part = |range: Range<usize>, earlier| {
            let own = logits.clone().narrow(1, range.start, range.len());
            vocabulary_statistics(own, targets(), (range, 20), earlier)
        };
        statistics_loss(part(12..20, Some(part(0..12, None))), targets())
    };
    for scale in [0.3, 3.0, 300.0] {
        let logits = numbers([6, 20], scale).into_data();
        let whole = |logits| cross_entropy(logits, targets());
        for loss in [&whole as &dyn Fn(Tensor<2>) -> Tensor<1>, &parts] {
            let found = loss_and_gradient(&logits, loss);
            assert_eq!(found, loss_and_gradient(&logits, |logits| loss(logits.cast(DType::F32))), "{scale}");
        }
    }
}

#[test]
fn losses_of_routers_have_single_precision() {
    let weights: Arc<[f32]> = [0.25, 0.0, 0.5, 0.25, 0.0].into();
    let loads: Arc<[f32]> = [0.5, 1.5, 0.0, 2.0].into();
    check([numbers([5, 4], 2.0)], ResultType::Single, |[logits]| {
        router_losses(logits, loads.clone(), weights.clone()).unsqueeze()
    });
    let was_chosen: Arc<[f32]> = [1.0, 0.0, 0.0, 1.0, 1.0].into();
    check([numbers([5, 1], 2.0)], ResultType::Single, |[scores]| {
        choice_loss(scores, was_chosen.clone(), weights.clone()).unsqueeze()
    });
}

#[test]
fn squared_rectifiers() {
    check([numbers([4, 9], 2.0)], ResultType::Half, |[x]| relu_squared(x));
}

#[test]
fn scoped_attention() {
    let attention = ScopedAttention { head_dim: 8, rope_theta: Some(100.0), window: Some(20) };
    let documents = (0..70).map(|token| token / 30).collect();
    let scope = TokenScope { documents, ..TokenScope::whole(1, 70) };
    let mask = (0..2 * 70 * 70).map(|flag| u8::from(flag * 7919 % 13 < 4)).collect();
    let relations = Relations { count: 2, mask };
    let rows = |width| numbers([70, width], 1.0);
    check([rows(16), rows(8), rows(8), numbers([2, 2], 1.0)], ResultType::Half, |[q, k, v, table]| {
        attention.forward([q, k, v], &scope, Some((&relations, table)))
    });
}

#[test]
fn mamba() {
    let sizes = MambaSizes {
        heads: 4,
        head_dim: 3,
        groups: 2,
        state: 5,
        taps: 4,
        limits: (0.0, f64::INFINITY),
        epsilon: 1e-5,
    };
    let (width, channels) = (sizes.width(), sizes.convolved());
    let inputs = [
        numbers([9, 6], 1.0),
        numbers([6, sizes.projected()], 1.0),
        numbers([channels, sizes.taps], 0.7),
        numbers([1, channels], 0.3),
        numbers([3, 4], 1.0),
        numbers([1, width], 0.5) + 1.0,
        numbers([width, 6], 1.0),
    ];
    let vector = |tensor: Tensor<2>| {
        let size = tensor.dims().iter().product::<usize>();
        Param::initialized(ParamId::new(), tensor.reshape([size]))
    };
    let documents: Arc<[u32]> = [0, 0, 0, 0, 1, 1, 1, 1, 1].into();
    check(inputs, ResultType::Half, |[x, enter, weight, bias, heads, norm, leave]| {
        let head_vector = |row| vector(heads.clone().narrow(0, row, 1));
        let weight = weight.reshape([channels, 1, sizes.taps]);
        let mixer = Mamba2 {
            in_proj: linear(enter),
            conv1d: DepthwiseConvolution {
                weight: Param::initialized(ParamId::new(), weight),
                bias: Some(vector(bias)),
            },
            dt_bias: head_vector(0),
            A_log: head_vector(1),
            D: head_vector(2),
            norm: GroupNormWeight { weight: vector(norm) },
            out_proj: linear(leave),
            sizes,
        };
        mixer.forward(x, 9, Some(&documents))
    });
}

#[test]
fn mixtures_of_experts() {
    let inputs = [
        numbers([9, 6], 1.0),
        numbers([9, 2], 1.0),
        numbers([6, 4], 1.0),
        numbers([6, 4], 0.7),
        numbers([4, 6], 1.0),
    ];
    let mix = |[x, logits, gate, up, down]: [Tensor<2>; 5], gated: bool| {
        let expert = |factor: f32| Expert {
            gate_proj: gated.then(|| linear(gate.clone() * factor).into()),
            up_proj: linear(up.clone()).into(),
            down_proj: linear(down.clone() * factor).into(),
            adapter: None,
            form: super::ExpertForm::default(),
        };
        // An unused gate has the gradient zero.
        let unused = gate.clone().sum().reshape([1, 1]) * 0.0;
        mix_experts(x, &Routing::new(logits, 1, false), &[expert(1.0), expert(-0.5)]) + unused
    };
    check(inputs.clone(), ResultType::Half, |inputs| mix(inputs, true));
    check(inputs, ResultType::Half, |inputs| mix(inputs, false));
}

#[test]
fn operations_without_the_instruction() {
    run_without_instruction("nn::half_precision");
}
