//! The sums of squares of gradients, in f64.

use multiversion::multiversion;

use super::simd::LANES;
use super::threads::for_each;

/// Returns the [`sum_squares`] of each slice. Several threads take one slice at a time, so a sum has the same
/// bits for any number of threads.
pub fn sums_of_squares(slices: &[&[f32]]) -> Vec<f64> {
    let mut sums = vec![0.0; slices.len()];
    let elements = slices.iter().map(|slice| slice.len()).sum();
    for_each(sums.iter_mut().zip(slices), elements, |(sum, slice)| *sum = sum_squares(slice));
    sums
}

/// Returns `sum x²` in a fixed number of lanes, which are added in order at the end.
#[multiversion(targets = "simd")]
pub fn sum_squares(elements: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let (chunks, rest) = elements.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &element) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(element) * f64::from(element);
        }
    }
    let rest: f64 = rest.iter().map(|&element| f64::from(element) * f64::from(element)).sum();
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::threads::{CHUNK, LentThreads, with_threads};

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let numbers: Vec<f32> = (0..3 * CHUNK).map(|i| (i as f32 * 0.37).sin()).collect();
        let slices = [&numbers[..5], &numbers[7..2 * CHUNK], &[], &numbers[CHUNK..]];
        let alone = slices.map(sum_squares).to_vec();
        let threads = Arc::new(LentThreads::new(2));
        assert_eq!(with_threads(&threads, || sums_of_squares(&slices)), alone);
        assert_eq!(sums_of_squares(&slices), alone);
    }
}
