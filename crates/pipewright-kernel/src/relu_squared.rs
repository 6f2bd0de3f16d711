//! The squared rectifier (So et al., 2021): `max(x, 0)²`.

use half::bf16;
use multiversion::multiversion;

use super::element::Element;

/// Returns `max(x, 0)`. NaN stays NaN, which [`f32::max`] would replace by 0.
#[inline(always)]
fn rectify(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns `max(x, 0)²` of each element.
pub fn forward(x: &[f32]) -> Vec<f32> {
    forward_in(x)
}

/// Like [`forward`], on bfloat16.
pub fn forward_bf16(x: &[bf16]) -> Vec<bf16> {
    forward_in(x)
}

#[multiversion(targets = "simd")]
fn forward_in<T: Element>(x: &[T]) -> Vec<T> {
    let squared = |x: f32| rectify(x) * rectify(x);
    x.iter().map(|x| T::rounded(squared(x.single()))).collect()
}

/// Returns the gradient of `x`: `2 g max(x, 0)`.
pub fn backward(x: &[f32], gradient: &[f32]) -> Vec<f32> {
    backward_in(x, gradient)
}

/// Like [`backward`], on bfloat16.
pub fn backward_bf16(x: &[bf16], gradient: &[bf16]) -> Vec<bf16> {
    backward_in(x, gradient)
}

/// Like [`backward_bf16`], from a gradient in single precision.
pub fn backward_bf16_from_single(x: &[bf16], gradient: &[f32]) -> Vec<bf16> {
    backward_in(x, gradient)
}

#[multiversion(targets = "simd")]
fn backward_in<T: Element, G: Element>(x: &[T], gradient: &[G]) -> Vec<T> {
    x.iter().zip(gradient).map(|(x, g)| T::rounded(2.0 * g.single() * rectify(x.single()))).collect()
}
