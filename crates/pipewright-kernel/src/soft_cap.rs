//! Scores that are bounded smoothly: `cap tanh(score / cap)` takes the place of a score (Gemma Team, 2024).

use multiversion::multiversion;

use super::exp::exp;

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

/// Returns the hyperbolic tangent, within `3 * 2^-23` of its value. Near zero it is the polynomial
/// of Cephes' `tanhf` (Moshier, 1992).
#[inline(always)]
fn tanh(x: f32) -> f32 {
    const SMALL: f32 = 0.625;
    let square = x * x;
    let mut p = -5.704_988_7e-3;
    for coefficient in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
        p = p * square + coefficient;
    }
    let near = p * square * x + x;
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < SMALL { near } else { far }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes under Miri")]
    fn is_close_to_the_true_value() {
        let mut numbers: Vec<f32> = (-40_000..40_000).map(|i| i as f32 / 1000.0).collect();
        numbers.extend([1e-30, -1e-6, 200.0, -1e30]);
        for x in numbers {
            let (found, expected) = (f64::from(tanh(x)), f64::from(x).tanh());
            assert!(
                (found - expected).abs() <= 3.0 * f64::from(f32::EPSILON) * expected.abs(),
                "{x}: {found}"
            );
        }
    }

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
