//! Sums of the elements of rows, in a fixed number of lanes, and rows that are computed from them.

use multiversion::multiversion;

use super::simd::sum;

/// Returns the sum of each row.
#[multiversion(targets = "simd")]
pub fn sums(x: &[f32], width: usize) -> Vec<f32> {
    x.chunks_exact(width).map(|row| sum(width, |i| row[i])).collect()
}

/// Returns the sum of the products of each two rows.
#[multiversion(targets = "simd")]
pub fn dots(a: &[f32], b: &[f32], width: usize) -> Vec<f32> {
    let rows = a.chunks_exact(width).zip(b.chunks_exact(width));
    rows.map(|(a, b)| sum(width, |i| a[i] * b[i])).collect()
}

/// Returns each row times its factor.
#[multiversion(targets = "simd")]
pub fn scaled(x: &[f32], factors: &[f32], width: usize) -> Vec<f32> {
    let mut scaled = Vec::with_capacity(x.len());
    for (row, factor) in x.chunks_exact(width).zip(factors) {
        scaled.extend(row.iter().map(|x| x * factor));
    }
    scaled
}

/// Returns a row of `width` equal elements for each element.
pub fn repeated(elements: &[f32], width: usize) -> Vec<f32> {
    let mut repeated = Vec::with_capacity(elements.len() * width);
    for &element in elements {
        repeated.resize(repeated.len() + width, element);
    }
    repeated
}

/// Returns the gradient of the arguments of a softmax, from its `probabilities` and their `gradient`: `p (g - Σ p g)`.
#[multiversion(targets = "simd")]
pub fn softmax_slopes(probabilities: &[f32], gradient: &[f32], width: usize) -> Vec<f32> {
    let mut slopes = Vec::with_capacity(probabilities.len());
    for (p, g) in probabilities.chunks_exact(width).zip(gradient.chunks_exact(width)) {
        let along = sum(width, |i| p[i] * g[i]);
        slopes.extend(p.iter().zip(g).map(|(p, g)| p * (g - along)));
    }
    slopes
}

/// Returns each row less its mean.
#[multiversion(targets = "simd")]
pub fn centred(x: &[f32], width: usize) -> Vec<f32> {
    let mut centred = Vec::with_capacity(x.len());
    for row in x.chunks_exact(width) {
        let mean = sum(width, |i| row[i]) / width as f32;
        centred.extend(row.iter().map(|x| x - mean));
    }
    centred
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_by_itself() {
        let x: Vec<f32> = (0..60).map(|i| i as f32).collect();
        assert_eq!(sums(&x, 20), [190.0, 590.0, 990.0]);
        assert_eq!(dots(&x, &[2.0; 60], 20), [380.0, 1180.0, 1980.0]);
        assert_eq!(scaled(&x[..4], &[2.0, -1.0], 2), [0.0, 2.0, -2.0, -3.0]);
        assert_eq!(centred(&x[..6], 3), [-1.0, 0.0, 1.0, -1.0, 0.0, 1.0]);
        assert_eq!(repeated(&x[1..3], 3), [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
        assert_eq!(
            softmax_slopes(&[0.25, 0.75, 0.5, 0.5], &[4.0, 8.0, 1.0, 1.0], 2),
            [-0.75, 0.75, 0.0, 0.0]
        );
    }

    #[test]
    fn rows_take_no_more_memory_than_they_need() {
        let x = vec![0.5; 3 * 1001];
        for rows in [
            scaled(&x, &x[..3], 1001),
            repeated(&x[..3], 1001),
            softmax_slopes(&x, &x, 1001),
            centred(&x, 1001),
        ] {
            assert_eq!((rows.len(), rows.capacity()), (x.len(), x.len()));
        }
    }
}
