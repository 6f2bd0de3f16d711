//! Cross entropy of a softmax against target ids: `mean over rows of (log sum exp(logits) - logits[target])`.
//! Rows with the target [`IGNORED_TARGET`] do not count.

use std::mem::MaybeUninit;

use multiversion::multiversion;

use super::exp::exp;
use super::simd::{fresh, max, sum, written};

/// The target of a row that does not count.
pub const IGNORED_TARGET: usize = usize::MAX;

/// Returns the mean loss of the rows that count, in nats, and `log sum exp` of each of them for the backward
/// pass. If no row counts, the loss is 0.
///
/// The mean is computed in f64: it is one number per microbatch, and the loss that training reports.
///
/// # Panics
/// When a target other than [`IGNORED_TARGET`] is not below `vocabulary`.
pub fn forward(logits: &[f32], targets: &[usize], vocabulary: usize) -> (f32, Vec<f32>) {
    let mut normalisers = vec![0.0; targets.len()];
    normalise_counted(logits, targets, vocabulary, &mut normalisers);
    let rows = logits.chunks_exact(vocabulary).zip(targets).zip(&normalisers);
    let counted = rows.filter(|((_, target), _)| **target != IGNORED_TARGET);
    let total: f64 =
        counted.map(|((row, &target), &normaliser)| f64::from(normaliser) - f64::from(row[target])).sum();
    ((total / counted_rows(targets)) as f32, normalisers)
}

/// Returns the number of rows that count; at least 1.
fn counted_rows(targets: &[usize]) -> f64 {
    targets.iter().filter(|target| **target != IGNORED_TARGET).count().max(1) as f64
}

#[multiversion(targets = "simd")]
fn normalise_counted(logits: &[f32], targets: &[usize], vocabulary: usize, normalisers: &mut [f32]) {
    for ((row, &target), normaliser) in logits.chunks_exact(vocabulary).zip(targets).zip(normalisers) {
        if target != IGNORED_TARGET {
            *normaliser = normaliser_of(row);
        }
    }
}

#[multiversion(targets = "simd")]
pub(super) fn normalise(logits: &[f32], vocabulary: usize, normalisers: &mut [f32]) {
    for (row, normaliser) in logits.chunks_exact(vocabulary).zip(normalisers) {
        *normaliser = normaliser_of(row);
    }
}

/// Returns `log sum exp` of a row.
#[inline(always)]
fn normaliser_of(row: &[f32]) -> f32 {
    // If all logits of a row are masked, its sum is 0.
    let largest = max(row).max(f32::MIN);
    sum(row.len(), |i| exp(row[i] - largest)).ln() + largest
}

/// Returns the gradient of the logits: `g (softmax - one_hot) / rows` in the rows that count, and 0 in the
/// others.
///
/// # Panics
/// When a target other than [`IGNORED_TARGET`] is not below the size of the vocabulary.
pub fn backward(logits: &[f32], targets: &[usize], normalisers: &[f32], gradient: f32) -> Vec<f32> {
    let share = gradient / counted_rows(targets) as f32;
    let mut d_logits = fresh(logits.len());
    differences(logits, targets, normalisers, share, &mut d_logits);
    // SAFETY: there are a target and a normaliser for each row of `logits`, whose elements were written.
    unsafe { written(d_logits) }
}

/// Writes `share (softmax - one_hot)` of the rows that count, and zeros into the others.
#[multiversion(targets = "simd")]
fn differences(
    logits: &[f32],
    targets: &[usize],
    normalisers: &[f32],
    share: f32,
    d_logits: &mut [MaybeUninit<f32>],
) {
    let width = whole_rows(logits, targets.len());
    assert_eq!(targets.len(), normalisers.len(), "one normaliser a row");
    let rows = logits.chunks_exact(width).zip(d_logits.chunks_exact_mut(width));
    for (((logits, d_logits), &target), &normaliser) in rows.zip(targets).zip(normalisers) {
        if target == IGNORED_TARGET {
            d_logits.fill(MaybeUninit::new(0.0));
            continue;
        }
        write_scaled(logits, normaliser, share, d_logits);
        d_logits[target].write(exp(logits[target] - normaliser) * share - share);
    }
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
    let width = whole_rows(logits, normalisers.len());
    assert_eq!(normalisers.len(), shares.len(), "one share a row");
    let rows = logits.chunks_exact(width).zip(d_logits.chunks_exact_mut(width));
    for (((logits, d_logits), &normaliser), &share) in rows.zip(normalisers).zip(shares) {
        write_scaled(logits, normaliser, share, d_logits);
    }
}

/// Returns the width of a row, at least 1.
///
/// # Panics
/// When the rows are not whole.
#[inline(always)]
fn whole_rows(logits: &[f32], rows: usize) -> usize {
    let width = (logits.len() / rows.max(1)).max(1);
    assert_eq!(logits.len(), rows * width, "rows are whole");
    width
}

/// Writes `share exp(logits - normaliser)` of a row.
#[inline(always)]
fn write_scaled(logits: &[f32], normaliser: f32, share: f32, scaled: &mut [MaybeUninit<f32>]) {
    for (d, logit) in scaled.iter_mut().zip(logits) {
        d.write(exp(logit - normaliser) * share);
    }
}
