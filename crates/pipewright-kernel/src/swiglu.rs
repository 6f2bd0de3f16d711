//! The gated activation of the feed-forward layer (Shazeer, 2020): `silu(gate) up` with `silu(x) = x σ(x)`.

use std::mem::MaybeUninit;

use half::bf16;
use multiversion::multiversion;

#[cfg(target_arch = "x86_64")]
use super::avx512;
#[cfg(target_arch = "x86_64")]
use super::bf16_instructions::Instructions;
use super::element::Element;
use super::pointwise::sigmoid;
use super::simd::{fresh, written};

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns `silu(gate) up`. Both have the same length.
pub fn forward(gate: &[f32], up: &[f32]) -> Vec<f32> {
    forward_in(gate, up)
}

/// Like [`forward`], on bfloat16.
pub fn forward_bf16(gate: &[bf16], up: &[bf16]) -> Vec<bf16> {
    forward_in(gate, up)
}

fn forward_in<T: Element>(gate: &[T], up: &[T]) -> Vec<T> {
    let mut y = fresh(gate.len());
    // The first elements are computed as whole vectors if the processor has AVX512-BF16.
    #[cfg(target_arch = "x86_64")]
    let first = Instructions::detect().map_or(0, |own| avx512::swiglu(own, gate, up, &mut y));
    #[cfg(not(target_arch = "x86_64"))]
    let first = 0;
    forward_elements(&gate[first..], &up[first..], &mut y[first..]);
    // SAFETY: an element of `y` was written for each of `gate`, which are as many.
    unsafe { written(y) }
}

#[multiversion(targets = "simd")]
fn forward_elements<T: Element>(gate: &[T], up: &[T], y: &mut [MaybeUninit<T>]) {
    assert_eq!(gate.len(), up.len(), "gate and up have the same length");
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        let (gate, up) = (gate.single(), up.single());
        y.write(T::rounded(gate * sigmoid(gate) * up));
    }
}

/// Gradients of `gate` and `up`: `g up σ (1 + gate (1 - σ))` and `g gate σ`.
pub fn backward(gate: &[f32], up: &[f32], gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
    backward_in(gate, up, gradient)
}

/// Like [`backward`], on bfloat16.
pub fn backward_bf16(gate: &[bf16], up: &[bf16], gradient: &[bf16]) -> (Vec<bf16>, Vec<bf16>) {
    backward_in(gate, up, gradient)
}

/// Like [`backward_bf16`], from a gradient in single precision.
pub fn backward_bf16_from_single(gate: &[bf16], up: &[bf16], gradient: &[f32]) -> (Vec<bf16>, Vec<bf16>) {
    backward_in(gate, up, gradient)
}

fn backward_in<T: Element, G: Element>(gate: &[T], up: &[T], gradient: &[G]) -> (Vec<T>, Vec<T>) {
    let (mut d_gate, mut d_up) = (fresh(gate.len()), fresh(gate.len()));
    // The first elements are computed as whole vectors if the processor has AVX512-BF16.
    #[cfg(target_arch = "x86_64")]
    let first = Instructions::detect()
        .map_or(0, |own| avx512::swiglu_backward(own, (gate, up, gradient), &mut d_gate, &mut d_up));
    #[cfg(not(target_arch = "x86_64"))]
    let first = 0;
    let rest = (&gate[first..], &up[first..], &gradient[first..]);
    backward_elements(rest, &mut d_gate[first..], &mut d_up[first..]);
    // SAFETY: an element of both was written for each of `gate`, which are as many.
    unsafe { (written(d_gate), written(d_up)) }
}

#[multiversion(targets = "simd")]
fn backward_elements<T: Element, G: Element>(
    (gate, up, gradient): (&[T], &[T], &[G]),
    d_gate: &mut [MaybeUninit<T>],
    d_up: &mut [MaybeUninit<T>],
) {
    assert_eq!((gate.len(), gate.len()), (up.len(), gradient.len()), "all have the same length");
    let inputs = gate.iter().zip(up).zip(gradient);
    for (((gate, up), g), (d_gate, d_up)) in inputs.zip(d_gate.iter_mut().zip(d_up)) {
        let (gate, up, g) = (gate.single(), up.single(), g.single());
        let s = sigmoid(gate);
        d_gate.write(T::rounded(g * up * s * (1.0 + gate * (1.0 - s))));
        d_up.write(T::rounded(g * gate * s));
    }
}
