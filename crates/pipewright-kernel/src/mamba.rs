//! The Mamba-2 mixer between its two projections: the convolution, the scan and the gated norm.
//!
//! A row of the input projection's result has gates, the channels that are convolved, and raw steps, in this
//! order. The mixer reads it and writes its gradient in its element type, and computes in single precision:
//! the scan adds over whole sequences, and its decays are exponentials of sums.

use half::bf16;

use super::element::Element;
use super::pointwise::exp;
use super::{convolution, gated_norm, scan};

/// The inputs of the mixer. Parameters have single precision.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T = f32> {
    /// Rows of the input projection's result.
    pub projected: &'a [T],
    /// Sizes of the convolution, and the place of its channels in a row.
    pub convolution: convolution::Dims,
    /// Sizes of the scan.
    pub scan: scan::Dims,
    /// Sizes of the steps, and their place in a row.
    pub steps: scan::Steps,
    /// The convolution's weight, `[channels, taps]`.
    pub weight: &'a [f32],
    /// The convolution's bias, `[channels]`.
    pub bias: Option<&'a [f32]>,
    /// Added to the raw steps, `[heads]`.
    pub dt_bias: &'a [f32],
    /// The logarithm of each head's rate of decay.
    pub log_rates: &'a [f32],
    /// The factor of each head's input that is added to its result.
    pub skip: &'a [f32],
    /// The weight of the norm, one number for each channel of the result.
    pub norm: &'a [f32],
    /// Added to the mean of the squares in the norm.
    pub epsilon: f32,
    /// The document of each row; rows of one document follow each other.
    pub documents: Option<&'a [u32]>,
}

impl<T: Element> Inputs<'_, T> {
    fn convolution_inputs(&self) -> convolution::Inputs<'_, T> {
        let &Self { projected, convolution, weight, bias, documents, .. } = self;
        convolution::Inputs { dims: convolution, v: projected, weight, bias, documents }
    }

    fn norm_inputs<'a>(&'a self, y: &'a [T]) -> gated_norm::Inputs<'a, T> {
        gated_norm::Inputs {
            y,
            z: self.projected,
            stride: self.convolution.stride,
            weight: self.norm,
            runs: self.scan.groups,
            epsilon: self.epsilon,
        }
    }

    /// Calls `pass` with the inputs of the scan.
    fn with_scan<R>(&self, pass: impl FnOnce(scan::Inputs<'_>) -> R) -> R {
        let u = convolution::forward_in(self.convolution_inputs());
        let steps = scan::steps_in(self.steps, self.projected, self.dt_bias);
        let rates: Vec<f32> = self.log_rates.iter().map(|log| -exp(*log)).collect();
        let &Self { skip, documents, .. } = self;
        pass(scan::Inputs { dims: self.scan, u: &u, steps: &steps, rates: &rates, skip, documents })
    }
}

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns the scan's result, rows of all heads, which [`gated`] and [`gated_backward`] take.
pub fn scanned(inputs: Inputs<'_>) -> Vec<f32> {
    inputs.with_scan(scan::forward)
}

/// Like [`scanned`], on bfloat16. Each element is rounded once.
pub fn scanned_bf16(inputs: Inputs<'_, bf16>) -> Vec<bf16> {
    inputs.with_scan(scan::forward)
}

/// Returns the mixer's result from the scan's, and the scale of each run of the norm, which
/// [`gated_backward`] takes.
pub fn gated(inputs: Inputs<'_>, y: &[f32]) -> (Vec<f32>, Vec<f32>) {
    gated_norm::forward_in(inputs.norm_inputs(y))
}

/// Like [`gated`], on bfloat16.
pub fn gated_bf16(inputs: Inputs<'_, bf16>, y: &[bf16]) -> (Vec<bf16>, Vec<f32>) {
    gated_norm::forward_in(inputs.norm_inputs(y))
}

/// The gradients after the backward pass of the gate and the norm.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedGradients<T> {
    /// The gradient of the input projection's result. Only the gates have theirs.
    projected: Vec<T>,
    /// The gradient of the scan's result.
    y: Vec<f32>,
    /// The gradient of the weight of the norm.
    norm: Vec<f32>,
}

/// Returns the gradients from the scan's result, the scales of the norm and the gradient of the mixer's
/// result. None of these is needed afterwards.
pub fn gated_backward(
    inputs: Inputs<'_>,
    y: &[f32],
    scales: &[f32],
    gradient: &[f32],
) -> GatedGradients<f32> {
    gated_backward_in(inputs, y, scales, gradient)
}

/// Like [`gated_backward`], on bfloat16.
pub fn gated_backward_bf16(
    inputs: Inputs<'_, bf16>,
    y: &[bf16],
    scales: &[f32],
    gradient: &[bf16],
) -> GatedGradients<bf16> {
    gated_backward_in(inputs, y, scales, gradient)
}

fn gated_backward_in<T: Element>(
    inputs: Inputs<'_, T>,
    y: &[T],
    scales: &[f32],
    gradient: &[T],
) -> GatedGradients<T> {
    let mut projected = vec![T::rounded(0.0); inputs.projected.len()];
    let (y, norm) = gated_norm::backward_in(inputs.norm_inputs(y), scales, gradient, &mut projected);
    GatedGradients { projected, y, norm }
}

/// The gradients of the inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T> {
    /// The gradient of the input projection's result.
    pub projected: Vec<T>,
    /// In single precision.
    pub others: OtherGradients,
}

/// The gradients of the parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct OtherGradients {
    /// The gradient of the sums of the convolution, before its activation. The gradients of its weight
    /// ([`convolution::add_weight_gradient`]) and of its bias ([`convolution::sum_rows`]) follow from it.
    pub sums: Vec<f32>,
    /// The gradient of `dt_bias`.
    pub dt_bias: Vec<f32>,
    /// The gradient of the logarithms of the rates.
    pub log_rates: Vec<f32>,
    /// The gradient of `skip`.
    pub skip: Vec<f32>,
    /// The gradient of the weight of the norm.
    pub norm: Vec<f32>,
}

/// Returns the gradients of all inputs from the results of [`gated_backward`]. The convolution and the scan
/// are computed again.
pub fn scanned_backward(inputs: Inputs<'_>, gated: GatedGradients<f32>) -> Gradients<f32> {
    scanned_backward_in(inputs, gated)
}

/// Like [`scanned_backward`], on bfloat16. Each element of the gradient of `projected` is rounded once.
pub fn scanned_backward_bf16(inputs: Inputs<'_, bf16>, gated: GatedGradients<bf16>) -> Gradients<bf16> {
    scanned_backward_in(inputs, gated)
}

fn scanned_backward_in<T: Element>(inputs: Inputs<'_, T>, gated: GatedGradients<T>) -> Gradients<T> {
    let GatedGradients { mut projected, y, norm } = gated;
    let (scan_gradients, log_rates) = inputs.with_scan(|scan| {
        let scan_gradients = scan::backward(scan, &y);
        // `A = -exp(A_log)` is its own derivative.
        let log_rates: Vec<f32> =
            scan_gradients.rates.iter().zip(scan.rates).map(|(d, rate)| d * rate).collect();
        (scan_gradients, log_rates)
    });
    drop(y);
    let scan::Gradients { u: mut sums, steps, skip, .. } = scan_gradients;
    let dt_bias =
        scan::steps_backward(inputs.steps, inputs.projected, inputs.dt_bias, &steps, &mut projected);
    let convolution = inputs.convolution_inputs();
    convolution::activation_backward(convolution, &mut sums);
    convolution::input_gradient(convolution, &sums, &mut projected);
    Gradients { projected, others: OtherGradients { sums, dt_bias, log_rates, skip, norm } }
}
