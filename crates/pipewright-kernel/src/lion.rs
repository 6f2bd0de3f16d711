//! Lion, sign descent with one momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), in one
//! pass over memory.

use multiversion::multiversion;

use super::threads::{CHUNK, for_each};

/// The coefficients of a step.
#[derive(Clone, Copy, Debug)]
pub struct Coefficients {
    /// The share of the momentum in the update, and in the next momentum.
    pub betas: (f32, f32),
    /// The size of the update of each element.
    pub learning_rate: f32,
    /// `1 - learning rate x weight decay`.
    pub keep: f32,
}

/// Updates `parameter` and its momentum in place.
///
/// # Panics
/// If the lengths differ.
pub fn step(parameter: &mut [f32], gradient: &[f32], momentum: &mut [f32], by: Coefficients) {
    let len = parameter.len();
    assert_eq!((gradient.len(), momentum.len()), (len, len), "all have the same length");
    let chunks = parameter.chunks_mut(CHUNK).zip(gradient.chunks(CHUNK)).zip(momentum.chunks_mut(CHUNK));
    for_each(chunks, len, |((p, g), m)| step_chunk(p, g, m, by));
}

#[multiversion(targets = "simd")]
fn step_chunk(parameter: &mut [f32], gradient: &[f32], momentum: &mut [f32], by: Coefficients) {
    let Coefficients { betas: (beta_1, beta_2), learning_rate, keep } = by;
    for ((p, g), m) in parameter.iter_mut().zip(gradient).zip(momentum) {
        let direction = beta_1 * *m + (1.0 - beta_1) * g;
        // `signum` is 1 for 0.
        let sign = f32::from(i8::from(direction > 0.0) - i8::from(direction < 0.0));
        *p = keep * *p - learning_rate * sign;
        *m = beta_2 * *m + (1.0 - beta_2) * g;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_follows_the_sign_of_the_mean() {
        let by = Coefficients { betas: (0.5, 0.75), learning_rate: 0.1, keep: 0.5 };
        let mut parameter = [1.0, 1.0, 1.0, 1.0];
        let mut momentum = [1.0, -1.0, 1.0, 0.0];
        step(&mut parameter, &[1.0, 0.5, -1.0, 0.0], &mut momentum, by);
        assert_eq!(parameter, [0.4, 0.6, 0.5, 0.5]);
        assert_eq!(momentum, [1.0, -0.625, 0.5, 0.0]);
    }
}
