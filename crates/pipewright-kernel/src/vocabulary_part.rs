//! Cross entropy of a softmax whose vocabulary is cut into parts that are computed one after another.
//!
//! Each part adds its logits to two statistics of a row: the logarithm of the sum of the exponentials of all
//! logits so far (a *normaliser*), and the logit of the target, or 0 as long as no part had it. The loss of a
//! row is their difference after the last part. The statistics of rows are `[rows, 2]`. Before the first part
//! they are [`NOTHING`]. With [`Smoothing`], the mean of the logits under the distribution of the target takes the place of
//! its logit: each part adds what its logits contribute.

use half::bf16;
use multiversion::multiversion;

use super::cross_entropy::{Smoothing, compared, normalise, probability, scale_probabilities, whole_rows};
use super::element::Element;
use super::pointwise::{exp, ln_1p};

/// The statistics of a row before the first part: the logarithm of 0, and no logit. If all logits of a row
/// are masked, they are minus infinity, and the normaliser stays so. The loss of the row is then not a
/// number, as with a whole vocabulary.
pub const NOTHING: [f32; 2] = [f32::NEG_INFINITY, 0.0];

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns the statistics after a part from those before it. `columns` has the column of each row's target in
/// the part, or any larger number if another part has it.
pub fn forward(logits: &[f32], columns: &[usize], earlier: &[f32], smoothing: Smoothing) -> Vec<f32> {
    forward_in(logits, columns, earlier, smoothing)
}

/// Like [`forward`], on logits in bfloat16.
pub fn forward_bf16(logits: &[bf16], columns: &[usize], earlier: &[f32], smoothing: Smoothing) -> Vec<f32> {
    forward_in(logits, columns, earlier, smoothing)
}

fn forward_in<T: Element>(
    logits: &[T],
    columns: &[usize],
    earlier: &[f32],
    smoothing: Smoothing,
) -> Vec<f32> {
    let width = logits.len() / columns.len().max(1);
    let mut own = vec![0.0; columns.len()];
    normalise(logits, None, width.max(1), &mut own);
    let rows = logits.chunks_exact(width.max(1)).zip(columns).zip(own).zip(earlier.as_chunks().0);
    let of_parts = rows.flat_map(|(((row, &column), own), &[normaliser, target])| {
        [joined(normaliser, own), target + compared(row, row.get(column).copied(), smoothing)]
    });
    of_parts.collect()
}

/// Returns `ln(e^a + e^b)`; not a number if one of them is not.
fn joined(a: f32, b: f32) -> f32 {
    let (larger, smaller) = if a > b { (a, b) } else { (b, a) };
    if smaller == f32::NEG_INFINITY { larger } else { larger + ln_1p(exp(smaller - larger)) }
}

/// Replaces the logits by their gradient, and returns the gradient of the earlier statistics, from the
/// gradient of the later ones.
///
/// With `L` the later normaliser, `g`, `h` the gradients of a row's statistics and `q` the distribution of its target:
/// `g exp(logits - L) + h q`, and `g exp(earlier - L)` and `h`. A row whose logits are all masked up to this part has
/// gradients of 0 if a later part has a logit that is not: `g` is then 0.
pub fn backward(
    logits: &mut [f32],
    columns: &[usize],
    statistics: (&[f32], &[f32]),
    smoothing: Smoothing,
    gradient: &[f32],
) -> Vec<f32> {
    backward_in(logits, columns, statistics, smoothing, gradient)
}

/// Like [`backward`], on logits in bfloat16. Each element of their gradient is rounded once.
pub fn backward_bf16(
    logits: &mut [bf16],
    columns: &[usize],
    statistics: (&[f32], &[f32]),
    smoothing: Smoothing,
    gradient: &[f32],
) -> Vec<f32> {
    backward_in(logits, columns, statistics, smoothing, gradient)
}

fn backward_in<T: Element>(
    logits: &mut [T],
    columns: &[usize],
    (earlier, later): (&[f32], &[f32]),
    smoothing: Smoothing,
    gradient: &[f32],
) -> Vec<f32> {
    let normaliser = |(&[after, _], &[share, _]): (&[f32; 2], &[f32; 2])| {
        // Infinities have no difference.
        if share == 0.0 { after.max(f32::MIN) } else { after }
    };
    let gradients = gradient.as_chunks().0;
    let normalisers: Vec<f32> = later.as_chunks().0.iter().zip(gradients).map(normaliser).collect();
    replace_rows(logits, columns, &normalisers, smoothing, gradients);
    let rows = earlier.as_chunks().0.iter().zip(normalisers).zip(gradients);
    let d_earlier = rows
        .flat_map(|((&[before, _], after), &[share, of_target])| [share * exp(before - after), of_target]);
    d_earlier.collect()
}

/// Replaces the logits of each row by `g exp(logits - normaliser) + h q`, for the distribution `q` of the target at its
/// column.
#[multiversion(targets = "simd")]
fn replace_rows<T: Element>(
    logits: &mut [T],
    columns: &[usize],
    normalisers: &[f32],
    smoothing: Smoothing,
    gradients: &[[f32; 2]],
) {
    let width = whole_rows(logits.len(), columns.len());
    assert_eq!((columns.len(), columns.len()), (normalisers.len(), gradients.len()), "one for each row");
    let rows = logits.chunks_exact_mut(width).zip(columns).zip(normalisers).zip(gradients);
    for (((row, &column), &normaliser), &[share, of_target]) in rows {
        let less = -of_target * smoothing.each;
        let at_column = row
            .get(column)
            .map(|&logit| probability(logit, normaliser) * share - less + of_target * smoothing.target);
        scale_probabilities(row, normaliser, share, less);
        if let Some(d) = at_column {
            row[column] = T::rounded(d);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_exponentials_are_joined() {
        assert!((joined(1.0, 2.0) - (1f32.exp() + 2f32.exp()).ln()).abs() < 1e-6);
        assert_eq!(joined(f32::NEG_INFINITY, 3.0), 3.0);
        assert_eq!(joined(f32::NEG_INFINITY, f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert_eq!(joined(3.0, f32::NEG_INFINITY), 3.0);
        assert_eq!(joined(1e30, -1e30), 1e30);
        assert!(joined(f32::NAN, 1.0).is_nan() && joined(1.0, f32::NAN).is_nan());
        assert_eq!(joined(f32::INFINITY, 1.0), f32::INFINITY);
    }

    #[test]
    fn a_part_without_the_target_leaves_its_logit() {
        let found = forward(&[0.0, 0.0], &[usize::MAX], &[f32::NEG_INFINITY, 0.5], Smoothing::NONE);
        // Miri rounds `ln` at random.
        let tolerance = if cfg!(miri) { 1e-6 } else { 0.0 };
        assert!((found[0] - 2f32.ln()).abs() <= tolerance);
        assert_eq!(found[1], 0.5);
        let found = forward(&[0.0, 4.0], &[1], &NOTHING, Smoothing::NONE);
        assert_eq!(found[1], 4.0);
    }
}
