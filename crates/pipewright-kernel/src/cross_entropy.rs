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
fn normalise(logits: &[f32], vocabulary: usize, normalisers: &mut [f32]) {
    for (row, normaliser) in logits.chunks_exact(vocabulary).zip(normalisers) {
        let largest = max(row);
        *normaliser = sum(vocabulary, |i| exp(row[i] - largest)).ln() + largest;
    }
}

/// Returns the gradient of the logits: `g (softmax - one_hot) / rows`.
pub fn backward(logits: &[f32], targets: &[usize], normalisers: &[f32], gradient: f32) -> Vec<f32> {
    let vocabulary = logits.len() / targets.len().max(1);
    let share = gradient / targets.len() as f32;
    let mut d_logits = fresh(logits.len());
    probabilities(logits, normalisers, share, &mut d_logits);
    // SAFETY: there is a normaliser for each row of `logits`, whose elements were written.
    let mut d_logits = unsafe { written(d_logits) };
    for (row, &target) in d_logits.chunks_exact_mut(vocabulary.max(1)).zip(targets) {
        row[target] -= share;
    }
    d_logits
}

#[multiversion(targets = "simd")]
fn probabilities(logits: &[f32], normalisers: &[f32], share: f32, d_logits: &mut [MaybeUninit<f32>]) {
    let width = (logits.len() / normalisers.len().max(1)).max(1);
    assert_eq!(logits.len(), normalisers.len() * width, "rows are whole");
    let rows = logits.chunks_exact(width).zip(d_logits.chunks_exact_mut(width));
    for ((logits, d_logits), normaliser) in rows.zip(normalisers) {
        for (d, logit) in d_logits.iter_mut().zip(logits) {
            d.write(exp(logit - normaliser) * share);
        }
    }
}
