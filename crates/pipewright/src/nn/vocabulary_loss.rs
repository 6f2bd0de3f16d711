//! The loss of a language model on any device, with a backward pass of its own. The tape keeps the logits and a
//! few numbers for each row.
//!
//! The vocabulary may be split over the ranks of a tensor group. The ranks then exchange three numbers for each
//! row: the largest logit, the sum of the exponentials relative to it, and the logit of the target or zero.
//! Each rank computes the loss, and in the backward the gradient of its own logits.
//!
//! The training loss of a language model whose vocabulary is split over the ranks of a tensor group.
//!
//! Each rank has the logits of its part of the vocabulary.

use std::sync::Arc;

use burn::tensor::{IndexingUpdateOp, Int, Tensor};

use super::composed::at_least_single;
use super::cross_entropy::{cross_entropy, weighted_cross_entropy, weights_of_valid};
use super::embedding::local_ids;
use super::parallel::TensorParallel;
use super::targets::IGNORED_TARGET;
use crate::autodiff::{Rule, inner_of, record};

/// Returns the mean of the losses of weighted rows for a vocabulary of this size. The rank has the logits
/// `[rows, part of the vocabulary]`.
pub(super) fn loss(
    logits: Tensor<2>,
    rows: WeightedRows,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> Tensor<1> {
    let WeightedRows { targets, weights, whole } = rows;
    let shares = (weights / whole).unsqueeze_dim::<2>(1);
    let (columns, presence) = local_ids(targets.inner(), vocabulary, tensor.range(vocabulary));
    let (columns, presence) = (columns.unsqueeze_dim::<2>(1), presence.float().unsqueeze_dim::<2>(1));
    let kept = inner_of(logits.clone());
    let values = at_least_single(kept.clone());
    let presence = presence.cast(values.dtype());

    // All logits that this rank has of a row may be masked.
    let largest = values.clone().max_dim(1).clamp_min(f32::MIN);
    let sums = (values.clone() - largest.clone()).exp().sum_dim(1);
    let target = values.clone().gather(1, columns.clone()).mask_fill(presence.clone().equal_elem(0.0), 0.0);
    let of_ranks = tensor.all_gather(Tensor::cat(vec![largest, sums, target], 1));
    let column = |index: usize| of_ranks.iter().map(move |rank| rank.clone().narrow(1, index, 1));
    let largest = column(0).reduce(Tensor::max_pair).expect("a group has this rank");
    let scaled = column(1).zip(column(0)).map(|(sum, own)| sum * (own - largest.clone()).exp());
    let sum = scaled.reduce(|sum, part| sum + part).expect("a group has this rank");
    let target = column(2).reduce(|sum, part| sum + part).expect("a group has this rank");
    let normalisers = largest + sum.log();
    let losses = normalisers.clone() - target;
    let shares = shares.cast(losses.dtype());
    let loss = weighted_sum(losses, shares.clone()).reshape([1, 1]);
    let rule = LossRule { logits: kept, normalisers, columns, presence, shares };
    record([logits.clone(), logits], loss, Arc::new(rule)).reshape([1])
}

#[derive(Debug)]
struct LossRule {
    /// In their own precision.
    logits: Tensor<2>,
    /// The logarithm of the sum of the exponentials of all logits of a row.
    normalisers: Tensor<2>,
    columns: Tensor<2, Int>,
    presence: Tensor<2>,
    /// The factors of the rows in the loss.
    shares: Tensor<2>,
}

impl Rule for LossRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let Self { logits, normalisers, columns, presence, shares } = self;
        let probabilities = (at_least_single(logits.clone()) - normalisers.clone()).exp();
        let targets = presence.clone().neg();
        let difference = probabilities.scatter(1, columns.clone(), targets, IndexingUpdateOp::Add);
        let d_logits = difference * gradient.cast(normalisers.dtype()) * shares.clone();
        [Some(d_logits.cast(logits.dtype())), None]
    }
}

/// Returns the sum of all losses times their weights. A loss of weight 0 adds nothing, even if it is
/// infinite: the target of such a row is any id, whose logit may be masked.
pub(super) fn weighted_sum<const D: usize>(losses: Tensor<D>, weights: Tensor<D>) -> Tensor<1> {
    sum_in_order(losses.mask_fill(weights.clone().equal_elem(0.0), 0.0) * weights)
}

/// Returns the sum of all elements, `[1]`, with the same bits every time: on devices, Burn's sum over all
/// elements adds in no fixed order, and its sum along a dimension in a fixed one.
fn sum_in_order<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    let count = tensor.shape().num_elements();
    tensor.reshape([count]).sum_dim(0)
}

/// The targets and weights of rows. Rows of weight 0 have target 0.
pub(super) struct WeightedRows {
    pub(super) targets: Tensor<1, Int>,
    pub(super) weights: Tensor<1>,
    /// The sum of the weights; 1 if all are 0, because the sum of the losses is then 0, and so is their mean.
    pub(super) whole: Tensor<1>,
}

impl WeightedRows {
    /// Panics if the number of targets or of weights differs from the number of rows.
    pub(super) fn of(rows: usize, targets: Tensor<1, Int>, weights: Tensor<1>) -> Self {
        assert_eq!(targets.dims(), [rows], "one target per row");
        assert_eq!(weights.dims(), [rows], "one weight per row");
        let targets = targets.mask_fill(weights.clone().equal_elem(0.0), 0);
        let weights = at_least_single(weights);
        let whole = sum_in_order(weights.clone());
        let whole = whole.clone().mask_fill(whole.equal_elem(0.0), 1.0);
        Self { targets, weights, whole }
    }
}

/// Returns [`cross_entropy`], with the same ignored targets, of a vocabulary of this size, whose logits are
/// split over the ranks of `tensor`.
///
/// Shapes: logits `[rows, part of the vocabulary]`, targets `[rows]`, result `[1]`, which is equal on all
/// ranks.
///
/// # Panics
/// When a target is outside the vocabulary, the number of targets differs from the number of rows, or a rank
/// of the group fails.
pub fn split_cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> Tensor<1> {
    if tensor.ranks() == 1 {
        return cross_entropy(logits, targets);
    }
    let weights = weights_of_valid(targets.clone(), IGNORED_TARGET);
    split_weighted_cross_entropy(logits, targets, weights, vocabulary, tensor)
}

/// Returns [`weighted_cross_entropy`] of a vocabulary of this size, whose logits are split over the ranks of
/// `tensor`.
///
/// Shapes: logits `[rows, part of the vocabulary]`, targets `[rows]`, weights `[rows]`, result `[1]`, which
/// is equal on all ranks. All ranks have the same targets and weights.
///
/// # Panics
/// When the target of a row with a weight is outside the vocabulary, the number of targets or of weights
/// differs from the number of rows, or a rank of the group fails.
pub fn split_weighted_cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    weights: Tensor<1>,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> Tensor<1> {
    if tensor.ranks() == 1 {
        return weighted_cross_entropy(logits, targets, weights);
    }
    let [rows, _] = logits.dims();
    loss(logits, WeightedRows::of(rows, targets, inner_of(weights)), vocabulary, tensor)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData, Tolerance};

    use super::super::check::{numbers, on_ranks};
    use super::*;

    /// Masked logits are the lowest number, or minus infinity.
    #[test]
    fn a_rank_whose_logits_are_masked_adds_nothing() {
        let targets = || Tensor::from_data(TensorData::new(vec![0i64, 3], [2]), &Device::flex());
        let masked = |logits: Tensor<2>| {
            let low = logits.narrow(1, 0, 4);
            Tensor::cat(vec![low.clone(), Tensor::full([2, 4], f32::NEG_INFINITY, &low.device())], 1)
        };
        let found = on_ranks(2, |tensor| {
            let own = masked(numbers([2, 8], 1.0)).narrow(1, 4 * tensor.rank().index as usize, 4);
            let own = own.autodiff().require_grad();
            let loss = split_cross_entropy(own.clone(), targets(), 8, &tensor);
            let gradient = own.grad(&loss.clone().backward()).expect("it is a leaf");
            (loss.inner().into_data(), gradient)
        });
        let of_rows = numbers([2, 8], 1.0).narrow(1, 0, 4);
        let expected = cross_entropy(of_rows, targets()).into_data();
        found[0].0.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-6));
        assert_eq!(found[1].1.to_data(), TensorData::zeros::<f32, _>([2, 4]));
    }

    /// Compares a loss of split logits, `[rows, vocabulary]`, and its gradient with the loss and the gradient
    /// of the whole vocabulary, three times.
    fn check(
        [rows, vocabulary]: [usize; 2],
        (ranks, scale): (u32, f32),
        of_whole: impl Fn(Tensor<2>) -> Tensor<1>,
        of_split: impl Fn(Tensor<2>, &TensorParallel) -> Tensor<1> + Sync,
    ) {
        let whole = numbers([rows, vocabulary], scale).autodiff().require_grad();
        let loss = of_whole(whole.clone());
        let expected = whole.grad(&(loss.clone() * 3.0).backward()).expect("it is a leaf");
        let found = on_ranks(ranks, |tensor| {
            let range = tensor.range(vocabulary);
            let own = numbers([rows, vocabulary], scale).narrow(1, range.start, range.len());
            let own = own.autodiff().require_grad();
            let loss = of_split(own.clone(), &tensor);
            let gradient = own.grad(&(loss.clone() * 3.0).backward()).expect("it is a leaf");
            (loss.inner().into_data(), gradient)
        });
        let tolerance = Tolerance::rel_abs(1e-5, 1e-6);
        for (own, _) in &found {
            own.assert_approx_eq::<f32>(&loss.clone().inner().into_data(), tolerance);
            assert_eq!(own, &found[0].0, "the same bits on all ranks");
        }
        let gradient = Tensor::cat(found.into_iter().map(|(_, gradient)| gradient).collect(), 1);
        gradient.into_data().assert_approx_eq::<f32>(&expected.into_data(), tolerance);
    }

    fn ids(targets: &[i64]) -> Tensor<1, Int> {
        Tensor::from_data(TensorData::new(targets.to_vec(), [targets.len()]), &Device::flex())
    }

    /// Like [`check`], but with weights, on 2 and 4 ranks.
    fn check_weighted(targets: &[i64], weights: impl Fn(Tensor<1, Int>) -> Tensor<1> + Sync, scale: f32) {
        let weights = || weights(ids(targets));
        for ranks in [2, 4] {
            check(
                [targets.len(), 10],
                (ranks, scale),
                |logits| weighted_cross_entropy(logits, ids(targets), weights().autodiff()),
                |logits, tensor| split_weighted_cross_entropy(logits, ids(targets), weights(), 10, tensor),
            );
        }
    }

    #[test]
    fn weighted_rows_count_as_for_the_whole_vocabulary() {
        let weights =
            |values: [f32; 5]| move |_: Tensor<1, Int>| Tensor::from_floats(values, &Device::flex());
        check_weighted(&[0, 9, 2, 4, 5], weights([0.5, 2.0, 1.0, 0.25, 3.0]), 0.3);
        check_weighted(&[0, 9, 2, 4, 5], weights([0.5, 2.0, 1.0, 0.25, 3.0]), 300.0);
        // The targets of rows without weight may be any numbers.
        check_weighted(&[0, -7, 2, 400, 5], weights([0.5, 0.0, 1.0, 0.0, 3.0]), 5.0);
        check_weighted(&[-100; 5], weights([0.0; 5]), 5.0);
    }

    #[test]
    fn ignored_targets_do_not_count() {
        check_weighted(&[0, -100, 9, -100, -100, 3], |targets| weights_of_valid(targets, -100), 1.0);
    }

    #[test]
    fn the_first_id_may_be_masked_in_rows_of_weight_0() {
        let (targets, weights) = ([1, -100, 9, 5], [0.5, 0.0, 2.0, 1.0]);
        let weights = || Tensor::<1>::from_floats(weights, &Device::flex());
        let masked = |logits: Tensor<2>| {
            let [_, width] = logits.dims();
            let rest = logits.clone().narrow(1, 1, width - 1);
            Tensor::cat(vec![logits.narrow(1, 0, 1).full_like(f32::NEG_INFINITY), rest], 1)
        };
        for ranks in [2, 4] {
            check(
                [targets.len(), 10],
                (ranks, 1.0),
                |logits| {
                    let row = |row: usize| logits.clone().narrow(0, row, 1);
                    let valid = masked(Tensor::cat(vec![row(0), row(2), row(3)], 0));
                    let weights = Tensor::from_floats([0.5, 2.0, 1.0], &Device::flex().autodiff());
                    weighted_cross_entropy(valid, ids(&[1, 9, 5]), weights)
                },
                |logits, tensor| {
                    let own = if tensor.rank().index == 0 { masked(logits) } else { logits };
                    split_weighted_cross_entropy(own, ids(&targets), weights(), 10, tensor)
                },
            );
        }
    }

    #[test]
    fn a_rank_that_is_alone_has_the_whole_vocabulary() {
        let ids = || ids(&[1, -100, 4]);
        let alone = TensorParallel::default();
        let logits = || numbers([3, 5], 1.0);
        let weights = || weights_of_valid(ids(), -100);
        let found = split_weighted_cross_entropy(logits(), ids(), weights(), 5, &alone);
        assert_eq!(found.into_data(), weighted_cross_entropy(logits(), ids(), weights()).into_data());
    }

    #[test]
    fn ignored_targets_do_not_count_without_weights() {
        let targets = [0, -100, 9, -100, 3];
        for ranks in [2, 4] {
            check(
                [5, 10],
                (ranks, 1.0),
                |logits| cross_entropy(logits, ids(&targets)),
                |logits, tensor| split_cross_entropy(logits, ids(&targets), 10, tensor),
            );
        }
    }

    #[test]
    fn the_loss_and_its_gradient_are_those_of_the_whole_vocabulary() {
        let targets = [0, 19, 2, 9, 10, 3];
        for of in [(2, 0.3), (3, 5.0), (4, 300.0)] {
            check(
                [6, 20],
                of,
                |logits| cross_entropy(logits, ids(&targets)),
                |logits, tensor| split_cross_entropy(logits, ids(&targets), 20, tensor),
            );
        }
    }
}
