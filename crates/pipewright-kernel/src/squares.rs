//! The sum of squares of a gradient, in f64.

use multiversion::multiversion;

use super::simd::LANES;

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
