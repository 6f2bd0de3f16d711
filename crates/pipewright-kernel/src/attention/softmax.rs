//! Scores and weights of a block of queries.

use multiversion::multiversion;

use super::super::element::Element;
use super::super::pointwise::{exp, ln};
use super::super::product::Matrix;
use super::super::simd::{max, sum};
use super::inputs::Rows;

/// Computes the scores of a block of queries.
pub(super) fn score<T: Element>(
    scores: &mut [f32],
    queries: &[T],
    keys: &[T],
    head_dim: usize,
    rows: Rows<'_>,
) {
    let Rows { first, count, low, .. } = rows;
    let queries = Matrix::new(&queries[first * head_dim..], count, head_dim);
    let keys = Matrix::new(&keys[low * head_dim..], rows.span(), head_dim);
    T::product_into(scores, rows.span(), queries, keys.transposed());
}

/// Turns scores into weights; the weight of a key that a query does not see is 0. A sink is a further score
/// of each row.
#[multiversion(targets = "simd")]
pub(super) fn softmax(scores: &mut [f32], rows: Rows<'_>, sink: Option<f32>, normalisers: &mut [f32]) {
    for (row, (scores, normaliser)) in scores.chunks_exact_mut(rows.span()).zip(normalisers).enumerate() {
        let [before, seen, after] = rows.split(row, scores);
        let largest = sink.map_or_else(|| max(seen), |sink| max(seen).max(sink));
        for score in seen.iter_mut() {
            *score = exp(*score - largest);
        }
        let total = sum(seen.len(), |i| seen[i]) + sink.map_or(0.0, |sink| exp(sink - largest));
        let share = 1.0 / total;
        for score in seen.iter_mut() {
            *score *= share;
        }
        before.fill(0.0);
        after.fill(0.0);
        *normaliser = largest + ln(total);
    }
}

/// Turns scores into weights `P` again, and `dP` into `dS`, both in place. Returns the gradient of the sink.
#[multiversion(targets = "simd")]
pub(super) fn softmax_backward<T: Element>(
    scores: &mut [f32],
    d_weights: &mut [f32],
    (rows, sink, normalisers): (Rows<'_>, Option<f32>, &[f32]),
    (out, gradient): (&[T], &[T]),
    stride: usize,
    value_dim: usize,
) -> f32 {
    let (span, mut d_sink) = (rows.span(), 0.0);
    let both = scores.chunks_exact_mut(span).zip(d_weights.chunks_exact_mut(span));
    for (row, ((scores, d_weights), normaliser)) in both.zip(normalisers).enumerate() {
        let (out, gradient) = (&out[row * stride..][..value_dim], &gradient[row * stride..][..value_dim]);
        let along = sum(value_dim, |i| out[i].single() * gradient[i].single());
        // The value of a sink is zero, so `dP` of it is zero.
        d_sink -= sink.map_or(0.0, |sink| exp(sink - normaliser) * along);
        let [before, seen, after] = rows.split(row, scores);
        let [d_before, d_seen, d_after] = rows.split(row, d_weights);
        for (score, d) in seen.iter_mut().zip(d_seen) {
            *score = exp(*score - normaliser);
            *d = *score * (*d - along);
        }
        for hidden in [before, after, d_before, d_after] {
            hidden.fill(0.0);
        }
    }
    d_sink
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::super::half::Half;
    use super::super::super::numbers::numbers;
    use super::*;

    #[test]
    fn bf16_is_read_as_the_numbers_that_it_stands_for() {
        // Three queries over their own and two earlier keys; heads of 4 elements in rows of 7.
        let rows = Rows { first: 0, count: 3, earlier: 2, low: 0, end: 5, starts: None };
        let (scores, d_weights, normalisers) = (numbers(15, 1), numbers(15, 2), numbers(3, 3));
        let [out, gradient] = [4, 5].map(|seed| bf16::narrowed(&numbers(18, seed)));
        let mut narrow = (scores.clone(), d_weights.clone());
        softmax_backward(&mut narrow.0, &mut narrow.1, (rows, None, &normalisers), (&out, &gradient), 7, 4);
        let [out, gradient] = [&out, &gradient].map(|numbers| bf16::widened(numbers));
        let mut wide = (scores, d_weights);
        softmax_backward(&mut wide.0, &mut wide.1, (rows, None, &normalisers), (&out, &gradient), 7, 4);
        assert_eq!(narrow, wide);
    }
}
