//! Adam with decoupled weight decay (Loshchilov and Hutter, 2019), in one pass over memory.

use multiversion::multiversion;

/// The coefficients of one step; `t` is the number of the step, from 1.
#[derive(Clone, Copy, Debug)]
pub struct Coefficients {
    /// Decay rates of the two moments.
    pub betas: (f32, f32),
    /// `learning rate / (1 - beta1^t)`.
    pub step_size: f32,
    /// `1 / (1 - beta2^t)`.
    pub second_correction: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// `1 - learning rate x weight decay`.
    pub keep: f32,
}

/// Updates `parameter` and both moments in place.
#[multiversion(targets = "simd")]
pub fn step(
    parameter: &mut [f32],
    gradient: &[f32],
    first: &mut [f32],
    second: &mut [f32],
    by: Coefficients,
) {
    let Coefficients { betas: (beta_1, beta_2), step_size, second_correction, epsilon, keep } = by;
    let len = parameter.len();
    assert_eq!((gradient.len(), first.len(), second.len()), (len, len, len), "all are as long");
    let moments = first.iter_mut().zip(second);
    for ((p, g), (m, v)) in parameter.iter_mut().zip(gradient).zip(moments) {
        *m = beta_1 * *m + (1.0 - beta_1) * g;
        *v = beta_2 * *v + (1.0 - beta_2) * g * g;
        *p = keep * *p - step_size * *m / ((*v * second_correction).sqrt() + epsilon);
    }
}
