//! Multiplies the elements of a slice by a factor.

use multiversion::multiversion;

use super::threads::{CHUNK, for_each};

/// Multiplies each element by `factor`, in place.
pub fn scale(elements: &mut [f32], factor: f32) {
    let len = elements.len();
    for_each(elements.chunks_mut(CHUNK), len, |chunk| scale_chunk(chunk, factor));
}

#[multiversion(targets = "simd")]
fn scale_chunk(elements: &mut [f32], factor: f32) {
    for element in elements {
        *element *= factor;
    }
}
