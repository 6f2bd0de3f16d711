//! A gated activation with bounds (OpenAI, 2025, <https://arxiv.org/abs/2508.10925>):
//! `(up + 1) gate σ(alpha gate)`, where the gate is at most `limit`, and `up` is between `-limit` and `limit`.

use multiversion::multiversion;

use super::swiglu::sigmoid;

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

/// Returns the activation of each pair of elements. Both have the same length.
#[multiversion(targets = "simd")]
pub fn forward(gate: &[f32], up: &[f32], bounds: Bounds) -> Vec<f32> {
    assert_eq!(gate.len(), up.len(), "gate and up are as long");
    let Bounds { alpha, limit } = bounds;
    let activated = |(&gate, &up): (&f32, &f32)| {
        let gate = bounded(gate, limit);
        (up.clamp(-limit, limit) + 1.0) * gate * sigmoid(alpha * gate)
    };
    gate.iter().zip(up).map(activated).collect()
}

/// Returns the gradients of `gate` and `up`: with `s = σ(alpha gate)`, they are
/// `g (up + 1) s (1 + alpha gate (1 - s))` and `g gate s`, and zero outside of the bounds.
#[multiversion(targets = "simd")]
pub fn backward(gate: &[f32], up: &[f32], gradient: &[f32], bounds: Bounds) -> (Vec<f32>, Vec<f32>) {
    assert_eq!((gate.len(), gate.len()), (up.len(), gradient.len()), "all are as long");
    let Bounds { alpha, limit } = bounds;
    let (mut d_gate, mut d_up) = (vec![0.0; gate.len()], vec![0.0; gate.len()]);
    let inputs = gate.iter().zip(up).zip(gradient);
    for (((&gate, &up), &g), (d_gate, d_up)) in inputs.zip(d_gate.iter_mut().zip(&mut d_up)) {
        let (is_above, gate) = (gate > limit, bounded(gate, limit));
        let s = sigmoid(alpha * gate);
        let slope = s * (1.0 + alpha * gate * (1.0 - s));
        *d_gate = if is_above { 0.0 } else { g * (up.clamp(-limit, limit) + 1.0) * slope };
        *d_up = if up.abs() > limit { 0.0 } else { g * gate * s };
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
