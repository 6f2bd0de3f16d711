//! Sums of the elements of rows, in a fixed number of lanes.

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
pub fn scaled(x: &[f32], factors: &[f32], width: usize) -> Vec<f32> {
    let rows = x.chunks_exact(width).zip(factors);
    rows.flat_map(|(row, factor)| row.iter().map(move |x| x * factor)).collect()
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
    }
}
