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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::threads::{LentThreads, with_threads};

    #[test]
    fn each_element_is_multiplied_once() {
        let numbers: Vec<f32> = (0..3 * CHUNK + 5).map(|i| (i as f32 * 0.37).sin()).collect();
        let expected: Vec<f32> = numbers.iter().map(|x| x * 0.3).collect();
        let scaled = |mut numbers: Vec<f32>| {
            scale(&mut numbers, 0.3);
            numbers
        };
        assert_eq!(scaled(numbers.clone()), expected);
        let threads = Arc::new(LentThreads::new(2));
        assert_eq!(with_threads(&threads, || scaled(numbers)), expected);
    }
}
