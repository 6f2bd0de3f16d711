//! Scores that are bounded smoothly: `cap tanh(score / cap)` takes the place of a score (Gemma Team, 2024).

use multiversion::multiversion;

use super::pointwise::tanh;

/// Bounds scores in place.
#[multiversion(targets = "simd")]
pub(crate) fn bound(scores: &mut [f32], cap: f32) {
    for score in scores {
        *score = cap * tanh(*score / cap);
    }
}

/// Turns the gradient of bounded scores into the gradient of the scores, in place.
#[multiversion(targets = "simd")]
pub(crate) fn bound_backward(gradient: &mut [f32], bounded: &[f32], cap: f32) {
    for (d, bounded) in gradient.iter_mut().zip(bounded) {
        let tanh = bounded / cap;
        *d *= 1.0 - tanh * tanh;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_is_the_slope() {
        let (cap, step) = (3.0, 1e-3);
        for score in [-5.0, -0.3, 0.0, 1.0, 4.0] {
            let mut scores = [score - step, score, score + step];
            bound(&mut scores, cap);
            let mut gradient = [1.0];
            bound_backward(&mut gradient, &scores[1..2], cap);
            let slope = (scores[2] - scores[0]) / (2.0 * step);
            assert!((gradient[0] - slope).abs() < 1e-3, "{score}: {gradient:?} {slope}");
        }
    }
}
