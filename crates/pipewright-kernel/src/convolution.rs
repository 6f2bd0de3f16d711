//! The causal depthwise convolution of a state-space block, with the activation after it: in every channel,
//! `u_t = silu(bias + sum_k w_k v_(t - back))` with `back = taps - 1 - k`. The sum stops at the beginning of
//! the sequence and of the document.

use half::bf16;
use multiversion::multiversion;

use super::element::Element;
use super::pointwise::sigmoid;

/// Sizes of a convolution, and the place of its channels in the rows of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Rows of a sequence.
    pub sequence: usize,
    /// Channels, each with weights of its own.
    pub channels: usize,
    /// Rows that a result depends on, its own included.
    pub taps: usize,
    /// Elements between the beginnings of two rows of the input.
    pub stride: usize,
    /// The first channel's place in a row of the input.
    pub start: usize,
}

impl Dims {
    fn input<T>(self, v: &[T], row: usize) -> &[T] {
        &v[row * self.stride + self.start..][..self.channels]
    }

    /// Returns how many rows before `row` the convolution sees there.
    #[inline(always)]
    fn reach(self, documents: Option<&[u32]>, row: usize) -> usize {
        let within = (row % self.sequence).min(self.taps - 1);
        let Some(documents) = documents else { return within };
        (1..=within).take_while(|back| documents[row - back] == documents[row]).count()
    }
}

/// Returns the weight `[channels, taps]` as `[taps, channels]`, the latest tap first.
fn by_distance(dims: Dims, weight: &[f32]) -> Vec<f32> {
    let Dims { channels, taps, .. } = dims;
    let tap_of = |i: usize| i % channels * taps + taps - 1 - i / channels;
    (0..channels * taps).map(|i| weight[tap_of(i)]).collect()
}

/// The inputs of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T = f32> {
    /// Sizes.
    pub dims: Dims,
    /// Rows of [`Dims::stride`] elements.
    pub v: &'a [T],
    /// `[channels, taps]`.
    pub weight: &'a [f32],
    /// `[channels]`.
    pub bias: Option<&'a [f32]>,
    /// The document of each row; rows of one document follow each other.
    pub documents: Option<&'a [u32]>,
}

impl<T> Inputs<'_, T> {
    fn rows(&self) -> usize {
        self.v.len() / self.dims.stride
    }
}

/// Returns the result, rows of `channels`.
pub fn forward(inputs: Inputs<'_>) -> Vec<f32> {
    forward_in(inputs)
}

/// Like [`forward`], from elements of any type.
#[multiversion(targets = "simd")]
pub(crate) fn forward_in<T: Element>(inputs: Inputs<'_, T>) -> Vec<f32> {
    let mut u = vec![0f32; inputs.rows() * inputs.dims.channels];
    let weight = by_distance(inputs.dims, inputs.weight);
    for (row, u) in u.chunks_exact_mut(inputs.dims.channels).enumerate() {
        weigh(inputs, &weight, row, u);
        for u in u.iter_mut() {
            *u *= sigmoid(*u);
        }
    }
    u
}

/// Computes a row before its activation.
#[inline(always)]
fn weigh<T: Element>(inputs: Inputs<'_, T>, weight: &[f32], row: usize, out: &mut [f32]) {
    let dims = inputs.dims;
    match inputs.bias {
        Some(bias) => out.copy_from_slice(bias),
        None => out.fill(0.0),
    }
    for back in (0..=dims.reach(inputs.documents, row)).rev() {
        let v = dims.input(inputs.v, row - back);
        for ((out, v), w) in out.iter_mut().zip(v).zip(&weight[back * dims.channels..]) {
            *out += v.single() * w;
        }
    }
}

/// Returns the gradient of `v`, whose rows have the channels alone, and turns the gradient of the result into the
/// gradient of the sums before the activation, in place.
pub fn backward(inputs: Inputs<'_>, gradient: &mut [f32]) -> Vec<f32> {
    activation_backward(inputs, gradient);
    let mut d_v = vec![0f32; inputs.v.len()];
    input_gradient(inputs, gradient, &mut d_v);
    d_v
}

/// Turns the gradient of the result into the gradient of the sums before the activation, in place.
#[multiversion(targets = "simd")]
pub(crate) fn activation_backward<T: Element>(inputs: Inputs<'_, T>, gradient: &mut [f32]) {
    let weight = by_distance(inputs.dims, inputs.weight);
    let mut sums = vec![0f32; inputs.dims.channels];
    for (row, gradient) in gradient.chunks_exact_mut(inputs.dims.channels).enumerate() {
        weigh(inputs, &weight, row, &mut sums);
        for (g, &v) in gradient.iter_mut().zip(&sums) {
            let s = sigmoid(v);
            *g *= s * (1.0 + v * (1.0 - s));
        }
    }
}

/// Writes the gradient of `v` into the same places of `d_v`, each element rounded once. `gradient` belongs to
/// the sums before the activation.
#[multiversion(targets = "simd")]
pub(crate) fn input_gradient<T: Element>(inputs: Inputs<'_, T>, gradient: &[f32], d_v: &mut [T]) {
    let weight = by_distance(inputs.dims, inputs.weight);
    let (dims, rows) = (inputs.dims, inputs.rows());
    let mut sums = vec![0f32; dims.channels];
    for row in 0..rows {
        sums.fill(0.0);
        // The later rows that see this one follow each other.
        for back in 0..dims.taps.min(rows - row) {
            let later = row + back;
            if dims.reach(inputs.documents, later) < back {
                break;
            }
            let gradient = &gradient[later * dims.channels..];
            for ((sum, g), w) in sums.iter_mut().zip(gradient).zip(&weight[back * dims.channels..]) {
                *sum += g * w;
            }
        }
        let d_v = &mut d_v[row * dims.stride + dims.start..][..dims.channels];
        for (d, &sum) in d_v.iter_mut().zip(&sums) {
            *d = T::rounded(sum);
        }
    }
}

/// The inputs of the gradient of the weight.
#[derive(Clone, Copy, Debug)]
pub struct WeightInputs<'a, T = f32> {
    /// Sizes.
    pub dims: Dims,
    /// The input of the forward pass.
    pub v: &'a [T],
    /// The documents of the forward pass.
    pub documents: Option<&'a [u32]>,
    /// The gradient of the sums before the activation.
    pub gradient: &'a [f32],
}

/// Adds the gradient of the weight, `[channels, taps]`, to `sum`.
pub fn add_weight_gradient(inputs: WeightInputs<'_>, sum: &mut [f32]) {
    add_weight_gradient_in(inputs, sum);
}

/// Like [`add_weight_gradient`], from an input in bfloat16.
pub fn add_weight_gradient_bf16(inputs: WeightInputs<'_, bf16>, sum: &mut [f32]) {
    add_weight_gradient_in(inputs, sum);
}

#[multiversion(targets = "simd")]
fn add_weight_gradient_in<T: Element>(inputs: WeightInputs<'_, T>, sum: &mut [f32]) {
    let dims = inputs.dims;
    let Dims { channels, taps, .. } = dims;
    let mut by_distance = vec![0f32; channels * taps];
    for (row, gradient) in inputs.gradient.chunks_exact(dims.channels).enumerate() {
        for back in 0..=dims.reach(inputs.documents, row) {
            let v = dims.input(inputs.v, row - back);
            let sums = &mut by_distance[back * dims.channels..][..dims.channels];
            for ((sum, g), v) in sums.iter_mut().zip(gradient).zip(v) {
                *sum += g * v.single();
            }
        }
    }
    for (index, sum) in sum.iter_mut().enumerate() {
        *sum += by_distance[(taps - 1 - index % taps) * channels + index / taps];
    }
}

/// Returns the sum of rows, which is the gradient of the bias.
#[multiversion(targets = "simd")]
pub fn sum_rows(rows: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0f32; width];
    for row in rows.chunks_exact(width) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += x;
        }
    }
    sums
}
