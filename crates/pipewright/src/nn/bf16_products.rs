//! Tests that operations on bfloat16 use products of bfloat16, with the processor's instruction or without it.
//!
//! Subnormal numbers tell them apart: products of bfloat16 count them as zero, and single precision does
//! not. So each case has a result that is zero if its products are in bfloat16, and another number
//! otherwise.

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use pipewright_kernel::bf16_product::testing::run_without_instruction;

use super::layout::Layout;
use super::product::multiply;
use super::{CausalAttention, Expert, HeldLinear, Linear, ScopedAttention, TokenScope, mix_chosen};

/// A subnormal number.
const TINY: f32 = 1e-39;

/// A number whose product with [`TINY`] is not subnormal.
const LARGE: f32 = 1e20;

fn leaf<const R: usize, const C: usize>(numbers: [[f32; C]; R]) -> Tensor<2> {
    let numbers = Tensor::<2>::from_data(TensorData::from(numbers), &Device::flex());
    numbers.cast(DType::BF16).autodiff().require_grad()
}

/// Returns the gradients of leaves for the gradient `upstream` of each element of `y`.
fn gradients<const N: usize>(y: &Tensor<2>, upstream: f32, leaves: [&Tensor<2>; N]) -> [Vec<f32>; N] {
    let upstream = Tensor::<2>::full(y.dims(), upstream, &Device::flex()).cast(DType::BF16).autodiff();
    let gradients = (y.clone() * upstream).sum().backward();
    leaves.map(|leaf| numbers(&leaf.grad(&gradients).expect("a gradient")))
}

fn numbers(tensor: &Tensor<2>) -> Vec<f32> {
    tensor.to_data().convert_dtype(DType::F32).iter().collect()
}

/// Checks that all numbers are `flushed`.
fn check(case: &str, numbers: &[f32], flushed: f32) {
    assert!(numbers.iter().all(|&x| x == flushed), "{case}: {numbers:?}");
}

#[test]
fn products_with_weights() {
    for layout in [Layout::Plain, Layout::Transposed] {
        let run = |x: f32, weight: f32, upstream: f32| {
            let (x, weight) = (leaf([[x; 2]; 2]), leaf([[weight; 2]; 2]));
            let y = multiply(x.clone(), weight.clone(), layout, ParamId::new());
            let [d_x, d_weight] = gradients(&y, upstream, [&x, &weight]);
            (numbers(&y), d_x, d_weight)
        };
        check("x w", &run(TINY, LARGE, 1.0).0, 0.0);
        check("g wᵀ", &run(1.0, TINY, LARGE).1, 0.0);
        check("xᵀ g", &run(TINY, 1.0, LARGE).2, 0.0);
    }
}

/// The result of an expert of width 2 and inner width 1, and gradients.
struct Mixed {
    y: Vec<f32>,
    d_x: Vec<f32>,
    d_gate: Vec<f32>,
    d_up: Vec<f32>,
    d_down: Vec<f32>,
}

/// Sends one token through one expert.
fn mixed(x: [f32; 2], gate: Option<[f32; 2]>, up: [f32; 2], down: [f32; 2], upstream: f32) -> Mixed {
    let column = |[a, b]: [f32; 2]| leaf([[a], [b]]);
    let (x, up, down, weight) = (leaf([x]), column(up), leaf([down]), leaf([[1.0]]));
    let gate = gate.map(column);
    let linear = |weight: &Tensor<2>| {
        let weight = Param::initialized(ParamId::new(), weight.clone());
        HeldLinear::from(Linear { weight, bias: None })
    };
    let expert = Expert {
        gate_proj: gate.as_ref().map(linear),
        up_proj: linear(&up),
        down_proj: linear(&down),
        adapter: None,
        form: super::ExpertForm::default(),
    };
    let y = mix_chosen(x.clone(), weight, &[0], &[expert]);
    let [d_x, d_gate, d_up, d_down] = gradients(&y, upstream, [&x, gate.as_ref().unwrap_or(&up), &up, &down]);
    Mixed { y: numbers(&y), d_x, d_gate, d_up, d_down }
}

#[test]
fn mixtures_of_gated_experts() {
    let ones = [1.0; 2];
    let tiny_second = [1.0, TINY];
    let inverse = [1.0 / LARGE; 2];
    check("gate", &mixed([LARGE; 2], Some([TINY; 2]), inverse, [LARGE; 2], 1.0).y, 0.0);
    check("up", &mixed([LARGE; 2], Some(inverse), [TINY; 2], [LARGE; 2], 1.0).y, 0.0);
    check("down", &mixed([1e5; 2], Some(ones), ones, [TINY; 2], 1.0).y, 0.0);
    let found = mixed(ones, Some(ones), ones, [LARGE; 2], TINY);
    check("gradient of the activated rows", &found.d_x, 0.0);
    check("gradient of the down projection", &found.d_down, 0.0);
    check("gradient through up", &mixed(ones, Some([1.0, 0.0]), tiny_second, ones, LARGE).d_x[1..], 0.0);
    check(
        "gradient through the gate",
        &mixed(ones, Some(tiny_second), [1.0, 0.0], ones, LARGE).d_x[1..],
        0.0,
    );
    let found = mixed(tiny_second, Some(ones), ones, ones, LARGE);
    check("gradient of the gate projection", &found.d_gate[1..], 0.0);
    check("gradient of the up projection", &found.d_up[1..], 0.0);
}

#[test]
fn mixtures_of_experts_without_gates() {
    let ones = [1.0; 2];
    check("up", &mixed([1e38; 2], None, [TINY; 2], ones, 1.0).y, 0.0);
    check("down", &mixed([1e5; 2], None, ones, [TINY; 2], 1.0).y, 0.0);
    let found = mixed(ones, None, ones, [LARGE; 2], TINY);
    check("gradient of the activated rows", &found.d_x, 0.0);
    check("gradient of the down projection", &found.d_down, 0.0);
    check("gradient through up", &mixed(ones, None, [1.0, TINY], ones, LARGE).d_x[1..], 0.0);
    check("gradient of the up projection", &mixed([1.0, TINY], None, ones, ones, LARGE).d_up[1..], 0.0);
}

/// Checks an attention of two positions over one head of two elements.
fn check_attention(attend: impl Fn([Tensor<2>; 3]) -> Tensor<2>) {
    // Returns the result of the second query, and the gradients of all of its row, and of the first row of
    // keys and values.
    let run = |q: f32, k: [f32; 2], v: [f32; 2], upstream: f32| {
        let rows = |[first, second]: [f32; 2]| leaf([[first; 2], [second; 2]]);
        let (q, k, v) = (rows([q; 2]), rows(k), rows(v));
        let y = attend([q.clone(), k.clone(), v.clone()]);
        let [d_q, d_k, d_v] = gradients(&y, upstream, [&q, &k, &v]);
        [numbers(&y)[2..].to_vec(), d_q[2..].to_vec(), d_k[..2].to_vec(), d_v[..2].to_vec()]
    };
    // Both keys have the same weight if the scores are zero.
    check("scores", &run(1e38, [1e-38, 0.0], [0.0, 1.0], 1.0)[0], 0.5);
    check("weights by values", &run(1.0, [1.0; 2], [TINY; 2], 1.0)[0], 0.0);
    check("gradients of weights", &run(1.0, [0.0, 1.0], [0.0, TINY], LARGE)[1], 0.0);
    check("gradients of queries", &run(1.0, [TINY, 0.0], [0.0, 1.0], LARGE)[1], 0.0);
    check("gradients of keys", &run(TINY, [1.0; 2], [0.0, 1.0], LARGE)[2], 0.0);
    check("gradients of values", &run(1.0, [1.0; 2], [1.0; 2], TINY)[3], 0.0);
}

#[test]
fn causal_attention() {
    let attention = CausalAttention::new(2, 2, &Device::flex());
    check_attention(|[q, k, v]| attention.forward(q, k, v));
}

#[test]
fn scoped_attention() {
    let attention = ScopedAttention { head_dim: 2, rope_theta: None, window: None };
    check_attention(|inputs| attention.forward(inputs, &TokenScope::whole(1, 2), None));
}

#[test]
fn all_without_the_instruction() {
    run_without_instruction("nn::bf16_products");
}
