//! The loss of a language model on any device, with a backward pass of its own. The tape keeps the logits and a
//! few numbers for each row.
//!
//! The vocabulary may be split over the ranks of a tensor group. The ranks then exchange three numbers for each
//! row: the largest logit, the sum of the exponentials relative to it, and the logit of the target or zero (with label
//! smoothing, the mean of its logits under the distribution of the target).
//! Each rank computes the loss, and in the backward the gradient of its own logits.

use std::sync::Arc;

use burn::tensor::{IndexingUpdateOp, Int, Tensor};
use pipewright_kernel::cross_entropy::Smoothing;

use super::composed::at_least_single;
use super::embedding::local_ids;
use super::parallel::TensorParallel;
use super::pointwise::{exp, ln};
use super::row_sums::row_sums;
use super::weighted_rows::{WeightedRows, weighted_sum};
use crate::autodiff::{Rule, inner_of, record};

/// Returns the losses `[rows, 1]` of rows whose targets are below the vocabulary of this size. The rank has the
/// logits `[rows, part of the vocabulary]`.
pub(super) fn losses(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> Tensor<2> {
    let (losses, rule) = computed(&logits, targets, Smoothing::NONE, vocabulary, tensor);
    record([logits.clone(), logits], losses, Arc::new(rule))
}

/// Returns the mean of the losses of weighted rows for a vocabulary of this size. The rank has the logits
/// `[rows, part of the vocabulary]`.
pub(super) fn loss(
    logits: Tensor<2>,
    rows: WeightedRows,
    smoothing: Smoothing,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> Tensor<1> {
    let WeightedRows { targets, weights, whole } = rows;
    let (losses, rule) = computed(&logits, targets, smoothing, vocabulary, tensor);
    let shares = (weights / whole).unsqueeze_dim::<2>(1).cast(losses.dtype());
    let loss = weighted_sum(losses, shares.clone()).reshape([1, 1]);
    let rule = LossRule { shares: Some(shares), ..rule };
    record([logits.clone(), logits], loss, Arc::new(rule)).reshape([1])
}

/// Returns the losses of rows and the rule of their backward.
fn computed(
    logits: &Tensor<2>,
    targets: Tensor<1, Int>,
    smoothing: Smoothing,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> (Tensor<2>, LossRule) {
    let (columns, presence) = local_ids(targets.inner(), vocabulary, tensor.range(vocabulary));
    let (columns, presence) = (columns.unsqueeze_dim::<2>(1), presence.float().unsqueeze_dim::<2>(1));
    let kept = inner_of(logits.clone());
    let values = at_least_single(kept.clone());
    let presence = presence.cast(values.dtype());

    // All logits that this rank has of a row may be masked.
    let largest = values.clone().max_dim(1).clamp_min(f32::MIN);
    let sums = row_sums(exp(values.clone() - largest.clone()));
    let target = values.clone().gather(1, columns.clone()).mask_fill(presence.clone().equal_elem(0.0), 0.0);
    let target = compared(target, values, smoothing);
    let of_ranks = tensor.all_gather(Tensor::cat(vec![largest, sums, target], 1));
    let column = |index: usize| of_ranks.iter().map(move |rank| rank.clone().narrow(1, index, 1));
    let largest = column(0).reduce(Tensor::max_pair).expect("a group has this rank");
    let scaled = column(1).zip(column(0)).map(|(sum, own)| sum * exp(own - largest.clone()));
    let sum = scaled.reduce(|sum, part| sum + part).expect("a group has this rank");
    let target = column(2).reduce(|sum, part| sum + part).expect("a group has this rank");
    let normalisers = largest + ln(sum);
    let losses = normalisers.clone() - target;
    (losses, LossRule { logits: kept, normalisers, columns, presence, shares: None, smoothing })
}

#[derive(Debug)]
struct LossRule {
    /// In their own precision.
    logits: Tensor<2>,
    /// The logarithm of the sum of the exponentials of all logits of a row.
    normalisers: Tensor<2>,
    columns: Tensor<2, Int>,
    presence: Tensor<2>,
    /// The factors of the rows in the loss; `None` if each row has a loss of its own.
    shares: Option<Tensor<2>>,
    smoothing: Smoothing,
}

/// Returns the part of a rank's logits in the means of rows under the distributions of their targets: the `target` logits,
/// or 0, with their probability, and all logits with theirs.
pub(super) fn compared(target: Tensor<2>, logits: Tensor<2>, smoothing: Smoothing) -> Tensor<2> {
    // Logits may be minus infinity.
    if smoothing == Smoothing::NONE {
        return target;
    }
    target * smoothing.target() + row_sums(logits) * smoothing.each()
}

impl Rule for LossRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let Self { logits, normalisers, columns, presence, shares, smoothing } = self;
        let probabilities = exp(at_least_single(logits.clone()) - normalisers.clone());
        let is_plain = *smoothing == Smoothing::NONE;
        let probabilities = if is_plain { probabilities } else { probabilities - smoothing.each() };
        let targets = presence.clone() * -smoothing.target();
        let difference = probabilities.scatter(1, columns.clone(), targets, IndexingUpdateOp::Add);
        let d_losses = difference * gradient.cast(normalisers.dtype());
        let d_logits = match shares {
            Some(shares) => d_losses * shares.clone(),
            None => d_losses,
        };
        [Some(d_logits.cast(logits.dtype())), None]
    }
}
