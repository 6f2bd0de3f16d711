//! The gate and the norm after a scan: with `v = y silu(z)`, each run of neighbouring channels is divided by
//! `sqrt(mean(v²) + epsilon)` and multiplied by the weight.

use multiversion::multiversion;

use super::element::Element;
use super::pointwise::{exp, sigmoid};
use super::simd::sum;

/// The inputs of a gated norm.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T = f32> {
    /// Rows of as many elements as `weight`.
    pub y: &'a [T],
    /// The gates; a row begins every `stride` elements.
    pub z: &'a [T],
    /// Elements between the beginnings of two rows of `z`.
    pub stride: usize,
    /// One factor for each channel.
    pub weight: &'a [f32],
    /// Runs in a row, each with a norm of its own.
    pub runs: usize,
    /// Added to the mean of the squares.
    pub epsilon: f32,
}

/// Returns the result, and `1 / sqrt(mean(v²) + epsilon)` of each run.
pub fn forward(inputs: Inputs<'_>) -> (Vec<f32>, Vec<f32>) {
    forward_in(inputs)
}

/// Like [`forward`], on elements of any type.
#[multiversion(targets = "simd")]
pub(crate) fn forward_in<T: Element>(inputs: Inputs<'_, T>) -> (Vec<T>, Vec<f32>) {
    let Inputs { y, z, stride, weight, runs, epsilon } = inputs;
    let (width, run) = (weight.len(), weight.len() / runs);
    let mut out = vec![T::rounded(0.0); y.len()];
    let mut scales = vec![0f32; y.len() / run];
    let mut v = vec![0f32; width];
    for (row, (y, out)) in y.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
        let z = &z[row * stride..][..width];
        for ((v, y), z) in v.iter_mut().zip(y).zip(z) {
            let z = z.single();
            *v = y.single() * (z / (1.0 + exp(-z)));
        }
        let all = v.chunks_exact(run).zip(out.chunks_exact_mut(run)).zip(weight.chunks_exact(run));
        for (((v, out), weight), scale) in all.zip(&mut scales[row * runs..]) {
            *scale = 1.0 / (sum(run, |i| v[i] * v[i]) / run as f32 + epsilon).sqrt();
            for ((out, v), w) in out.iter_mut().zip(v).zip(weight) {
                *out = T::rounded(v * *scale * w);
            }
        }
    }
    (out, scales)
}

/// Returns the gradients of `y` and of the weight, and writes the gradient of `z`, each element rounded once,
/// into the same places of `d_z`.
#[multiversion(targets = "simd")]
pub(crate) fn backward_in<T: Element>(
    inputs: Inputs<'_, T>,
    scales: &[f32],
    gradient: &[T],
    d_z: &mut [T],
) -> (Vec<f32>, Vec<f32>) {
    let Inputs { y, z, stride, weight, runs, .. } = inputs;
    let (width, run) = (weight.len(), weight.len() / runs);
    let (mut d_y, mut d_weight) = (vec![0f32; y.len()], vec![0f32; width]);
    let (mut v, mut gate) = (vec![0f32; width], vec![0f32; width]);
    for (row, ((y, g), d_y)) in
        y.chunks_exact(width).zip(gradient.chunks_exact(width)).zip(d_y.chunks_exact_mut(width)).enumerate()
    {
        let z = &z[row * stride..][..width];
        let d_z = &mut d_z[row * stride..][..width];
        for (((v, gate), y), z) in v.iter_mut().zip(&mut gate).zip(y).zip(z) {
            *gate = sigmoid(z.single());
            *v = y.single() * z.single() * *gate;
        }
        for (index, &scale) in scales[row * runs..][..runs].iter().enumerate() {
            let part = index * run..(index + 1) * run;
            let (v, g, weight) = (&v[part.clone()], &g[part.clone()], &weight[part.clone()]);
            let along = scale * scale * sum(run, |i| g[i].single() * weight[i] * v[i]) / run as f32;
            for (((d, v), g), w) in d_y[part.clone()].iter_mut().zip(v).zip(g).zip(weight) {
                *d = scale * (g.single() * w - v * along);
            }
            for ((d, v), g) in d_weight[part].iter_mut().zip(v).zip(g) {
                *d += g.single() * v * scale;
            }
        }
        let both = d_y.iter_mut().zip(d_z);
        for (((d_y, d_z), y), (z, &gate)) in both.zip(y).zip(z.iter().zip(&gate)) {
            let (d_v, z) = (*d_y, z.single());
            *d_y = d_v * z * gate;
            *d_z = T::rounded(d_v * y.single() * gate * (1.0 + z * (1.0 - gate)));
        }
    }
    (d_y, d_weight)
}
