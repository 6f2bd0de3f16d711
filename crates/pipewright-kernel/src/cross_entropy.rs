//! Cross entropy of a softmax against target ids: `mean over rows of (log sum exp(logits) - logits[target])`.
//! Rows with the target [`IGNORED_TARGET`] do not count.
//!
//! With [`Smoothing`], the loss is the cross entropy of the softmax against a distribution that gives each id a part.

use half::bf16;
use multiversion::multiversion;

use super::element::Element;
use super::pointwise::{exp, ln};
use super::simd::{max_of, sum};

/// The target of a row that does not count.
pub const IGNORED_TARGET: usize = usize::MAX;

/// The distribution that a row is compared with (label smoothing; Szegedy et al., 2016,
/// <https://arxiv.org/abs/1512.00567>): each id of the vocabulary has the probability `each`, and the target has
/// `target` in addition. The loss of a row is `log sum exp(logits) - target logits[t] - each sum(logits)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Smoothing {
    pub(super) target: f32,
    pub(super) each: f32,
}

impl Smoothing {
    /// The target alone.
    pub const NONE: Self = Self { target: 1.0, each: 0.0 };

    /// Returns the distribution in which all ids of a vocabulary of this size share `share`.
    pub fn new(share: f64, vocabulary: usize) -> Self {
        Self { target: (1.0 - share) as f32, each: (share / vocabulary as f64) as f32 }
    }

    /// Returns the probability that the target has in addition to [`Smoothing::each`].
    pub fn target(self) -> f32 {
        self.target
    }

    /// Returns the probability of each id.
    pub fn each(self) -> f32 {
        self.each
    }
}

// Functions for each element type, not generic ones, so that their loops are compiled with this crate's
// optimisation.

/// Returns the mean loss of the rows that count, in nats, and `log sum exp` of each of them for the backward
/// pass. If no row counts, the loss is 0.
///
/// The mean is computed in f64: it is one number per microbatch, and the loss that training reports.
///
/// # Panics
/// When a target other than [`IGNORED_TARGET`] is not below `vocabulary`.
pub fn forward(
    logits: &[f32],
    targets: &[usize],
    vocabulary: usize,
    smoothing: Smoothing,
) -> (f32, Vec<f32>) {
    forward_in(logits, targets, vocabulary, smoothing)
}

/// Like [`forward`], on bfloat16.
pub fn forward_bf16(
    logits: &[bf16],
    targets: &[usize],
    vocabulary: usize,
    smoothing: Smoothing,
) -> (f32, Vec<f32>) {
    forward_in(logits, targets, vocabulary, smoothing)
}

fn forward_in<T: Element>(
    logits: &[T],
    targets: &[usize],
    vocabulary: usize,
    smoothing: Smoothing,
) -> (f32, Vec<f32>) {
    let mut normalisers = vec![0.0; targets.len()];
    normalise(logits, Some(targets), vocabulary, &mut normalisers);
    let rows = logits.chunks_exact(vocabulary).zip(targets).zip(&normalisers);
    let counted = rows.filter(|((_, target), _)| **target != IGNORED_TARGET);
    let total: f64 = counted
        .map(|((row, &target), &normaliser)| {
            f64::from(normaliser) - f64::from(compared(row, Some(row[target]), smoothing))
        })
        .sum();
    ((total / counted_rows(targets)) as f32, normalisers)
}

/// Returns the mean of the logits of a row under the distribution of its target, for a row with the logit of the
/// target or without it.
#[multiversion(targets = "simd")]
pub(super) fn compared<T: Element>(row: &[T], target: Option<T>, smoothing: Smoothing) -> f32 {
    let of_target = target.map_or(0.0, |target| target.single() * smoothing.target);
    // Logits may be minus infinity.
    if smoothing.each == 0.0 {
        of_target
    } else {
        of_target + smoothing.each * sum(row.len(), |i| row[i].single())
    }
}

/// Returns the number of rows that count; at least 1.
fn counted_rows(targets: &[usize]) -> f64 {
    targets.iter().filter(|target| **target != IGNORED_TARGET).count().max(1) as f64
}

/// Writes `log sum exp` of each row; with `targets`, of the rows that count.
#[multiversion(targets = "simd")]
pub(super) fn normalise<T: Element>(
    logits: &[T],
    targets: Option<&[usize]>,
    vocabulary: usize,
    normalisers: &mut [f32],
) {
    for (index, (row, normaliser)) in logits.chunks_exact(vocabulary).zip(normalisers).enumerate() {
        if targets.is_some_and(|targets| targets[index] == IGNORED_TARGET) {
            continue;
        }
        // If all logits of a row are masked, its sum is 0.
        let largest = max_of(row, T::single).max(f32::MIN);
        *normaliser = ln(sum(row.len(), |i| exp(row[i].single() - largest))) + largest;
    }
}

/// Replaces the logits by their gradient: `g (softmax - distribution) / rows` in the rows that count, and 0 in the
/// others.
///
/// # Panics
/// When a target other than [`IGNORED_TARGET`] is not below the size of the vocabulary.
pub fn backward(
    logits: &mut [f32],
    targets: &[usize],
    normalisers: &[f32],
    smoothing: Smoothing,
    gradient: f32,
) {
    backward_in(logits, targets, normalisers, smoothing, gradient);
}

/// Like [`backward`], on bfloat16. Each element of the gradient is rounded once.
pub fn backward_bf16(
    logits: &mut [bf16],
    targets: &[usize],
    normalisers: &[f32],
    smoothing: Smoothing,
    gradient: f32,
) {
    backward_in(logits, targets, normalisers, smoothing, gradient);
}

fn backward_in<T: Element>(
    logits: &mut [T],
    targets: &[usize],
    normalisers: &[f32],
    smoothing: Smoothing,
    gradient: f32,
) {
    let share = gradient / counted_rows(targets) as f32;
    differences(logits, targets, normalisers, smoothing, share);
}

/// Writes `share (softmax - distribution)` into the rows that count, and zeros into the others.
#[multiversion(targets = "simd")]
fn differences<T: Element>(
    logits: &mut [T],
    targets: &[usize],
    normalisers: &[f32],
    smoothing: Smoothing,
    share: f32,
) {
    let (of_each, of_target) = (share * smoothing.each, share * smoothing.target);
    let width = whole_rows(logits.len(), targets.len());
    assert_eq!(targets.len(), normalisers.len(), "one normaliser per row");
    for ((row, &target), &normaliser) in logits.chunks_exact_mut(width).zip(targets).zip(normalisers) {
        if target == IGNORED_TARGET {
            row.fill(T::rounded(0.0));
            continue;
        }
        let at_target = probability(row[target], normaliser) * share - of_each - of_target;
        scale_probabilities(row, normaliser, share, of_each);
        row[target] = T::rounded(at_target);
    }
}

/// Returns the width of a row, at least 1.
///
/// # Panics
/// When the rows are not whole.
#[inline(always)]
pub(super) fn whole_rows(elements: usize, rows: usize) -> usize {
    let width = (elements / rows.max(1)).max(1);
    assert_eq!(elements, rows * width, "rows are whole");
    width
}

/// Replaces the logits of a row by `share exp(logits - normaliser) - less`.
#[inline(always)]
pub(super) fn scale_probabilities<T: Element>(row: &mut [T], normaliser: f32, share: f32, less: f32) {
    for element in row {
        *element = T::rounded(probability(*element, normaliser) * share - less);
    }
}

#[inline(always)]
pub(super) fn probability<T: Element>(logit: T, normaliser: f32) -> f32 {
    exp(logit.single() - normaliser)
}
