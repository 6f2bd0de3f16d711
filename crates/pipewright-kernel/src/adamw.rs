//! Adam with decoupled weight decay (Loshchilov and Hutter, 2019), in one pass over memory.

use multiversion::multiversion;

use super::threads::{CHUNK, for_each};

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

impl Coefficients {
    /// Returns the updated element of a parameter and of both moments. All forms of the step compute this.
    #[inline(always)]
    fn updated(self, parameter: f32, gradient: f32, first: f32, second: f32) -> [f32; 3] {
        let Self { betas: (beta_1, beta_2), step_size, second_correction, epsilon, keep } = self;
        let first = beta_1 * first + (1.0 - beta_1) * gradient;
        let second = beta_2 * second + (1.0 - beta_2) * gradient * gradient;
        let root = (second * second_correction).sqrt() + epsilon;
        [keep * parameter - step_size * first / root, first, second]
    }
}

/// Updates `parameter` and both moments in place.
pub fn step(
    parameter: &mut [f32],
    gradient: &[f32],
    first: &mut [f32],
    second: &mut [f32],
    by: Coefficients,
) {
    let len = parameter.len();
    assert_eq!((gradient.len(), first.len(), second.len()), (len, len, len), "all have the same length");
    let moments = first.chunks_mut(CHUNK).zip(second.chunks_mut(CHUNK));
    let chunks = parameter.chunks_mut(CHUNK).zip(gradient.chunks(CHUNK)).zip(moments);
    for_each(chunks, len, |((p, g), (m, v))| step_chunk(p, g, m, v, by));
}

#[multiversion(targets = "simd")]
fn step_chunk(
    parameter: &mut [f32],
    gradient: &[f32],
    first: &mut [f32],
    second: &mut [f32],
    by: Coefficients,
) {
    let moments = first.iter_mut().zip(second);
    for ((p, g), (m, v)) in parameter.iter_mut().zip(gradient).zip(moments) {
        [*p, *m, *v] = by.updated(*p, *g, *m, *v);
    }
}

/// Like [`step`], with the same bits, but leaves the parameter: the updated one replaces the gradient.
pub fn step_over_gradient(
    parameter: &[f32],
    gradient: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
    by: Coefficients,
) {
    let len = parameter.len();
    assert_eq!((gradient.len(), first.len(), second.len()), (len, len, len), "all have the same length");
    let moments = first.chunks_mut(CHUNK).zip(second.chunks_mut(CHUNK));
    let chunks = parameter.chunks(CHUNK).zip(gradient.chunks_mut(CHUNK)).zip(moments);
    for_each(chunks, len, |((p, g), (m, v))| step_chunk_over_gradient(p, g, m, v, by));
}

#[multiversion(targets = "simd")]
fn step_chunk_over_gradient(
    parameter: &[f32],
    gradient: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
    by: Coefficients,
) {
    let moments = first.iter_mut().zip(second);
    for ((p, g), (m, v)) in parameter.iter().zip(gradient).zip(moments) {
        [*g, *m, *v] = by.updated(*p, *g, *m, *v);
    }
}

/// Like [`step`], with the same bits, but returns the updated parameter and moments and leaves the old ones.
pub fn step_apart(
    parameter: &[f32],
    gradient: &[f32],
    first: &[f32],
    second: &[f32],
    by: Coefficients,
) -> [Vec<f32>; 3] {
    let len = parameter.len();
    assert_eq!((gradient.len(), first.len(), second.len()), (len, len, len), "all have the same length");
    let mut updated = [vec![0.0; len], vec![0.0; len], vec![0.0; len]];
    let [new_parameter, new_first, new_second] = &mut updated;
    let moments = new_first.chunks_mut(CHUNK).zip(new_second.chunks_mut(CHUNK));
    let new = new_parameter.chunks_mut(CHUNK).zip(moments);
    let moments = first.chunks(CHUNK).zip(second.chunks(CHUNK));
    let old = parameter.chunks(CHUNK).zip(gradient.chunks(CHUNK)).zip(moments);
    for_each(new.zip(old), len, |((new_p, (new_m, new_v)), ((p, g), (m, v)))| {
        write_step([new_p, new_m, new_v], [p, g, m, v], by);
    });
    updated
}

/// Writes the updated parameter and moments. The old ones and the gradient are of the same length.
#[multiversion(targets = "simd")]
fn write_step(new: [&mut [f32]; 3], old: [&[f32]; 4], by: Coefficients) {
    let [new_parameter, new_first, new_second] = new;
    let [parameter, gradient, first, second] = old;
    let old = parameter.iter().zip(gradient).zip(first.iter().zip(second));
    let new = new_parameter.iter_mut().zip(new_first.iter_mut().zip(new_second));
    for (((p, g), (m, v)), (new_p, (new_m, new_v))) in old.zip(new) {
        [*new_p, *new_m, *new_v] = by.updated(*p, *g, *m, *v);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rayon::ThreadPoolBuilder;

    use super::*;
    use crate::threads::{LentThreads, with_threads};

    #[test]
    fn all_forms_have_the_same_bits() {
        check(1003);
    }

    #[test]
    fn several_threads_compute_the_same_bits() {
        let threads = Arc::new(LentThreads::new(2));
        let alone = ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
        let alone = alone.install(|| check(3 * CHUNK + 5));
        assert_eq!(with_threads(&threads, || check(3 * CHUNK + 5)), alone);
    }

    /// Compares the forms for parameters of this length, and returns the result.
    fn check(len: usize) -> [Vec<f32>; 3] {
        let numbers = |seed: f32| -> Vec<f32> { (0..len).map(|i| (i as f32 * 0.37 + seed).sin()).collect() };
        let by = Coefficients {
            betas: (0.9, 0.95),
            step_size: 3e-3,
            second_correction: 1.7,
            epsilon: 1e-8,
            keep: 0.999,
        };
        let gradient = numbers(1.0);
        let squares: Vec<f32> = numbers(3.0).iter().map(|x| x * x).collect();
        let old = [numbers(0.0), numbers(2.0), squares];
        let apart = step_apart(&old[0], &gradient, &old[1], &old[2], by);
        let (mut over, [mut first, mut second]) =
            (gradient.clone(), [1, 2].map(|index: usize| old[index].clone()));
        step_over_gradient(&old[0], &mut over, &mut first, &mut second, by);
        assert_eq!(apart, [over, first, second]);
        let [mut parameter, mut first, mut second] = old.clone();
        step(&mut parameter, &gradient, &mut first, &mut second, by);
        assert_eq!(apart, [parameter, first, second]);
        assert_ne!(apart, old);
        apart
    }
}
