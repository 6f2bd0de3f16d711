//! Cross entropy of a softmax against target ids: `mean over rows of (log sum exp(logits) - logits[target])`.

use std::mem::MaybeUninit;

use multiversion::multiversion;

use super::exp::exp;
use super::simd::{fresh, max, sum, written};

/// Returns the mean loss in nats, and `log sum exp` of each row for the backward pass.
///
/// The mean is computed in f64: it is one number per microbatch, and the loss that training reports.
pub fn forward(logits: &[f32], targets: &[usize], vocabulary: usize) -> (f32, Vec<f32>) {
    let mut normalisers = vec![0.0; targets.len()];
    normalise(logits, vocabulary, &mut normalisers);
    let rows = logits.chunks_exact(vocabulary).zip(targets).zip(&normalisers);
    let total: f64 =
        rows.map(|((row, &target), &normaliser)| f64::from(normaliser) - f64::from(row[target])).sum();
    ((total / targets.len() as f64) as f32, normalisers)
}

#[multiversion(targets = "simd")]
pub(super) fn normalise(logits: &[f32], vocabulary: usize, normalisers: &mut [f32]) {
    for (row, normaliser) in logits.chunks_exact(vocabulary).zip(normalisers) {
        // If all logits of a row are masked, its sum is 0.
        let largest = max(row).max(f32::MIN);
        *normaliser = sum(vocabulary, |i| exp(row[i] - largest)).ln() + largest;
    }
}

/// Returns the gradient of the logits: `g (softmax - one_hot) / rows`.
pub fn backward(logits: &[f32], targets: &[usize], normalisers: &[f32], gradient: f32) -> Vec<f32> {
    let vocabulary = logits.len() / targets.len().max(1);
    let share = gradient / targets.len() as f32;
    let mut d_logits = scaled_probabilities(logits, normalisers, &vec![share; targets.len()]);
    for (row, &target) in d_logits.chunks_exact_mut(vocabulary.max(1)).zip(targets) {
        row[target] -= share;
    }
    d_logits
}

/// Returns `share exp(logits - normaliser)`, with a normaliser and a share for each row.
pub(super) fn scaled_probabilities(logits: &[f32], normalisers: &[f32], shares: &[f32]) -> Vec<f32> {
    let mut scaled = fresh(logits.len());
    probabilities(logits, normalisers, shares, &mut scaled);
    // SAFETY: there are a normaliser and a share for each row of `logits`, whose elements were written.
    unsafe { written(scaled) }
}

#[multiversion(targets = "simd")]
fn probabilities(logits: &[f32], normalisers: &[f32], shares: &[f32], d_logits: &mut [MaybeUninit<f32>]) {
    let width = (logits.len() / normalisers.len().max(1)).max(1);
    assert_eq!(logits.len(), normalisers.len() * width, "rows are whole");
    assert_eq!(normalisers.len(), shares.len(), "one share a row");
    let rows = logits.chunks_exact(width).zip(d_logits.chunks_exact_mut(width));
    for (((logits, d_logits), normaliser), share) in rows.zip(normalisers).zip(shares) {
        for (d, logit) in d_logits.iter_mut().zip(logits) {
            d.write(exp(logit - normaliser) * share);
        }
    }
}
