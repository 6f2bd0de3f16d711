//! Root-mean-square normalisation (Zhang and Sennrich, 2019): `y = x s w` with
//! `s = 1 / sqrt(mean(x²) + epsilon)`, row by row.

use std::mem::MaybeUninit;

use half::bf16;
use multiversion::multiversion;

#[cfg(target_arch = "x86_64")]
use super::avx512;
#[cfg(target_arch = "x86_64")]
use super::bf16_instructions::Instructions;
use super::element::Element;
use super::simd::{fresh, sum, written};

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns the result, and `s` of each row for the backward pass. A row has as many elements as `weight`.
pub fn forward(x: &[f32], weight: &[f32], epsilon: f32) -> (Vec<f32>, Vec<f32>) {
    forward_in(x, weight, epsilon)
}

/// Like [`forward`], on bfloat16.
pub fn forward_bf16(x: &[bf16], weight: &[bf16], epsilon: f32) -> (Vec<bf16>, Vec<f32>) {
    forward_in(x, weight, epsilon)
}

fn forward_in<T: Element>(x: &[T], weight: &[T], epsilon: f32) -> (Vec<T>, Vec<f32>) {
    let mut y = fresh(x.len());
    let mut scales = vec![0.0; x.len() / weight.len()];
    match instructions(weight.len()) {
        #[cfg(target_arch = "x86_64")]
        Some(own) => avx512::norm(own, x, weight, epsilon, &mut y, &mut scales),
        _ => forward_rows(x, weight, epsilon, &mut y, &mut scales),
    }
    // SAFETY: a row of `y` was written for each row of `x`, which have the same length.
    (unsafe { written(y) }, scales)
}

/// Returns AVX512-BF16 if the processor has it and a row of this width consists of whole vectors.
#[cfg(target_arch = "x86_64")]
fn instructions(width: usize) -> Option<Instructions> {
    if width.is_multiple_of(avx512::BLOCK) { Instructions::detect() } else { None }
}

/// Other processors do not have AVX512-BF16.
#[cfg(not(target_arch = "x86_64"))]
fn instructions(_width: usize) -> Option<std::convert::Infallible> {
    None
}

#[multiversion(targets = "simd")]
fn forward_rows<T: Element>(
    x: &[T],
    weight: &[T],
    epsilon: f32,
    y: &mut [MaybeUninit<T>],
    scales: &mut [f32],
) {
    let width = weight.len();
    assert_eq!(x.len(), scales.len() * width, "rows are whole");
    for ((x, y), kept) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(scales) {
        let mean_square = sum(width, |i| x[i].single() * x[i].single()) / width as f32;
        let scale = 1.0 / (mean_square + epsilon).sqrt();
        *kept = scale;
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            y.write(T::rounded(x.single() * scale * w.single()));
        }
    }
}

/// Gradients of `x` and of the weight.
///
/// `dx = s (g w - x s² mean(g w x))`, and `dw` is the sum of `g x s` over rows.
pub fn backward(x: &[f32], weight: &[f32], scales: &[f32], gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let mut dw = vec![0.0; weight.len()];
    (backward_in(x, weight, scales, gradient, Some(&mut dw)), dw)
}

/// Like [`backward`], on bfloat16. The gradient of the weight has single precision.
pub fn backward_bf16(
    x: &[bf16],
    weight: &[bf16],
    scales: &[f32],
    gradient: &[bf16],
) -> (Vec<bf16>, Vec<f32>) {
    let mut dw = vec![0.0; weight.len()];
    (backward_in(x, weight, scales, gradient, Some(&mut dw)), dw)
}

/// Returns the gradient of `x` alone, with the bits of [`backward`].
pub fn input_gradient(x: &[f32], weight: &[f32], scales: &[f32], gradient: &[f32]) -> Vec<f32> {
    backward_in(x, weight, scales, gradient, None)
}

/// Like [`input_gradient`], on bfloat16.
pub fn input_gradient_bf16(x: &[bf16], weight: &[bf16], scales: &[f32], gradient: &[bf16]) -> Vec<bf16> {
    backward_in(x, weight, scales, gradient, None)
}

/// Returns the gradient of the weight alone, of `width` elements, with the bits of [`backward`].
pub fn weight_gradient(x: &[f32], scales: &[f32], gradient: &[f32], width: usize) -> Vec<f32> {
    let mut dw = vec![0.0; width];
    weight_rows(x, scales, gradient, &mut dw);
    dw
}

/// Like [`weight_gradient`], on bfloat16.
pub fn weight_gradient_bf16(x: &[bf16], scales: &[f32], gradient: &[bf16], width: usize) -> Vec<f32> {
    let mut dw = vec![0.0; width];
    weight_rows(x, scales, gradient, &mut dw);
    dw
}

/// Returns the gradient of `x`, and adds the gradient of the weight to `dw` if it is wanted.
fn backward_in<T: Element>(
    x: &[T],
    weight: &[T],
    scales: &[f32],
    gradient: &[T],
    dw: Option<&mut [f32]>,
) -> Vec<T> {
    let mut dx = fresh(x.len());
    match instructions(weight.len()) {
        #[cfg(target_arch = "x86_64")]
        Some(own) => {
            let inputs = avx512::NormGradient { x, weight, scales, gradient };
            avx512::norm_backward(own, inputs, &mut dx, dw);
        }
        _ => backward_rows(x, weight, scales, gradient, &mut dx, dw),
    }
    // SAFETY: a row of `dx` was written for each row of `x`, which have the same length.
    unsafe { written(dx) }
}

#[multiversion(targets = "simd")]
fn backward_rows<T: Element>(
    x: &[T],
    weight: &[T],
    scales: &[f32],
    gradient: &[T],
    dx: &mut [MaybeUninit<T>],
    dw: Option<&mut [f32]>,
) {
    let (width, mut dw) = (weight.len(), dw);
    assert_eq!((x.len(), gradient.len()), (scales.len() * width, x.len()), "rows are whole");
    let rows = x.chunks_exact(width).zip(gradient.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
    for (((x, g), dx), &scale) in rows.zip(scales) {
        let mean = sum(width, |i| g[i].single() * weight[i].single() * x[i].single()) / width as f32;
        let along = scale * scale * mean;
        for (((dx, x), g), w) in dx.iter_mut().zip(x).zip(g).zip(weight) {
            dx.write(T::rounded(scale * (g.single() * w.single() - x.single() * along)));
        }
        if let Some(dw) = dw.as_deref_mut() {
            for ((dw, x), g) in dw.iter_mut().zip(x).zip(g) {
                *dw += g.single() * x.single() * scale;
            }
        }
    }
}

#[multiversion(targets = "simd")]
fn weight_rows<T: Element>(x: &[T], scales: &[f32], gradient: &[T], dw: &mut [f32]) {
    let width = dw.len();
    assert_eq!((x.len(), gradient.len()), (scales.len() * width, x.len()), "rows are whole");
    let rows = x.chunks_exact(width).zip(gradient.chunks_exact(width));
    for ((x, g), &scale) in rows.zip(scales) {
        for ((dw, x), g) in dw.iter_mut().zip(x).zip(g) {
            *dw += g.single() * x.single() * scale;
        }
    }
}
