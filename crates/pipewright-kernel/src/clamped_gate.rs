//! A gated activation with bounds (OpenAI, 2025, <https://arxiv.org/abs/2508.10925>):
//! `(up + 1) gate σ(alpha gate)`, where the gate is at most `limit`, and `up` is between `-limit` and `limit`.

use half::bf16;
use multiversion::multiversion;

use super::element::Element;
use super::pointwise::sigmoid;

/// The constants of the activation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// The factor of the gate in the sigmoid.
    pub alpha: f32,
    /// The bound of the gate and of `up`.
    pub limit: f32,
}

/// Returns the gate within its bound. NaN stays NaN, which [`f32::min`] would replace by the bound.
#[inline(always)]
fn bounded(gate: f32, limit: f32) -> f32 {
    if gate > limit { limit } else { gate }
}

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns the activation of each pair of elements. Both have the same length.
pub fn forward(gate: &[f32], up: &[f32], bounds: Bounds) -> Vec<f32> {
    forward_in(gate, up, bounds)
}

/// Like [`forward`], on bfloat16.
pub fn forward_bf16(gate: &[bf16], up: &[bf16], bounds: Bounds) -> Vec<bf16> {
    forward_in(gate, up, bounds)
}

#[multiversion(targets = "simd")]
fn forward_in<T: Element>(gate: &[T], up: &[T], bounds: Bounds) -> Vec<T> {
    assert_eq!(gate.len(), up.len(), "gate and up have the same length");
    let Bounds { alpha, limit } = bounds;
    let activated = |(gate, up): (&T, &T)| {
        let (gate, up) = (bounded(gate.single(), limit), up.single());
        T::rounded((up.clamp(-limit, limit) + 1.0) * gate * sigmoid(alpha * gate))
    };
    gate.iter().zip(up).map(activated).collect()
}

/// Returns the gradients of `gate` and `up`: with `s = σ(alpha gate)`, they are
/// `g (up + 1) s (1 + alpha gate (1 - s))` and `g gate s`, and zero outside of the bounds.
pub fn backward(gate: &[f32], up: &[f32], gradient: &[f32], bounds: Bounds) -> (Vec<f32>, Vec<f32>) {
    backward_in(gate, up, gradient, bounds)
}

/// Like [`backward`], on bfloat16, from a gradient in single precision.
pub fn backward_bf16_from_single(
    gate: &[bf16],
    up: &[bf16],
    gradient: &[f32],
    bounds: Bounds,
) -> (Vec<bf16>, Vec<bf16>) {
    backward_in(gate, up, gradient, bounds)
}

#[multiversion(targets = "simd")]
fn backward_in<T: Element>(gate: &[T], up: &[T], gradient: &[f32], bounds: Bounds) -> (Vec<T>, Vec<T>) {
    assert_eq!((gate.len(), gate.len()), (up.len(), gradient.len()), "all have the same length");
    let Bounds { alpha, limit } = bounds;
    let zeros = || vec![T::rounded(0.0); gate.len()];
    let (mut d_gate, mut d_up) = (zeros(), zeros());
    let inputs = gate.iter().zip(up).zip(gradient);
    for (((gate, up), &g), (d_gate, d_up)) in inputs.zip(d_gate.iter_mut().zip(&mut d_up)) {
        let (gate, up) = (gate.single(), up.single());
        let (is_above, gate) = (gate > limit, bounded(gate, limit));
        let s = sigmoid(alpha * gate);
        let slope = s * (1.0 + alpha * gate * (1.0 - s));
        *d_gate = T::rounded(if is_above { 0.0 } else { g * (up.clamp(-limit, limit) + 1.0) * slope });
        *d_up = T::rounded(if up.abs() > limit { 0.0 } else { g * gate * s });
    }
    (d_gate, d_up)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_is_not_replaced_by_a_bound() {
        let bounds = Bounds { alpha: 1.5, limit: 2.0 };
        let (gate, up) = ([f32::NAN, 1.0, 3.0, 3.0], [0.5, f32::NAN, f32::NAN, 0.5]);
        let are_nan = |numbers: &[f32]| numbers.iter().map(|number| number.is_nan()).collect::<Vec<_>>();
        assert_eq!(are_nan(&forward(&gate, &up, bounds)), [true, true, true, false]);
        let (d_gate, d_up) = backward(&gate, &up, &[1.0; 4], bounds);
        // Above the bound the gradient of a gate is zero, whatever `up` is.
        assert_eq!(are_nan(&d_gate), [true, true, false, false]);
        assert_eq!(are_nan(&d_up), [true, false, false, false]);
    }
}
