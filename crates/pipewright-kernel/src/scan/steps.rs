//! The steps `δ = softplus(raw + bias)`, limited to a range.

use crate::element::Element;
use crate::pointwise::{sigmoid, softplus};

/// Sizes and limits of the steps, and their place in the rows of the input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Steps {
    /// Heads, each with a step for every row.
    pub heads: usize,
    /// Elements between the beginnings of two rows of the input.
    pub stride: usize,
    /// The first head's place in a row of the input.
    pub start: usize,
    /// The lowest and the highest step.
    pub limits: (f32, f32),
}

/// Returns the steps as `[heads, rows]`.
pub fn steps(of: Steps, raw: &[f32], bias: &[f32]) -> Vec<f32> {
    steps_in(of, raw, bias)
}

/// Like [`steps`], from elements of any type.
pub(crate) fn steps_in<T: Element>(of: Steps, raw: &[T], bias: &[f32]) -> Vec<f32> {
    let rows = raw.len() / of.stride;
    let mut steps = vec![0f32; of.heads * rows];
    for (row, raw) in raw.chunks_exact(of.stride).enumerate() {
        for (head, (raw, bias)) in raw[of.start..][..of.heads].iter().zip(bias).enumerate() {
            steps[head * rows + row] = limit(softplus(raw.single() + bias), of.limits);
        }
    }
    steps
}

/// Returns the gradient of the bias, and writes the gradient of the raw numbers, each rounded once, into the
/// same places of `d_raw`. `gradient` is `[heads, rows]`. A step that is limited passes no gradient on.
pub(crate) fn steps_backward<T: Element>(
    of: Steps,
    raw: &[T],
    bias: &[f32],
    gradient: &[f32],
    d_raw: &mut [T],
) -> Vec<f32> {
    let rows = raw.len() / of.stride;
    let mut d_bias = vec![0f32; of.heads];
    for (row, (raw, d_raw)) in raw.chunks_exact(of.stride).zip(d_raw.chunks_exact_mut(of.stride)).enumerate()
    {
        let (raw, d_raw) = (&raw[of.start..][..of.heads], &mut d_raw[of.start..][..of.heads]);
        for (head, (raw, d_raw)) in raw.iter().zip(d_raw).enumerate() {
            let sum = raw.single() + bias[head];
            let step = softplus(sum);
            let is_free = of.limits.0 <= step && step <= of.limits.1;
            let d = if is_free { gradient[head * rows + row] * sigmoid(sum) } else { 0.0 };
            *d_raw = T::rounded(d);
            d_bias[head] += d;
        }
    }
    d_bias
}

/// Returns the step within the limits. NaN stays NaN, which [`f32::max`] would replace by a limit.
fn limit(step: f32, (low, high): (f32, f32)) -> f32 {
    if step > high {
        high
    } else if step < low {
        low
    } else {
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_limited_and_nan_stays() {
        let of = Steps { heads: 1, stride: 1, start: 0, limits: (0.5, 2.0) };
        let found = steps(of, &[-9.0, 9.0, 1.0, f32::NAN], &[0.0]);
        assert_eq!(found[..3], [0.5, 2.0, softplus(1.0)]);
        assert!(found[3].is_nan());
    }
}
