//! The squared rectifier (So et al., 2021): `max(x, 0)²`.

use multiversion::multiversion;

/// Returns `max(x, 0)²` of each element.
#[multiversion(targets = "simd")]
pub fn forward(x: &[f32]) -> Vec<f32> {
    x.iter().map(|x| x.max(0.0) * x.max(0.0)).collect()
}

/// Returns the gradient of `x`: `2 g max(x, 0)`.
#[multiversion(targets = "simd")]
pub fn backward(x: &[f32], gradient: &[f32]) -> Vec<f32> {
    x.iter().zip(gradient).map(|(x, g)| 2.0 * g * x.max(0.0)).collect()
}
