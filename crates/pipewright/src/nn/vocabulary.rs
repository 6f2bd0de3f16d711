//! The training loss of a language model whose vocabulary is split over the ranks of a tensor group.
//!
//! Each rank has the logits of its part of the vocabulary.

use burn::tensor::{Int, Tensor};
use pipewright_kernel::cross_entropy::Smoothing;

use super::cross_entropy::smoothed_cross_entropy;
use super::parallel::TensorParallel;
use super::targets::IGNORED_TARGET;
use super::vocabulary_loss::loss;
use super::weighted_cross_entropy::{weighted_cross_entropy, weights_of_valid};
use super::weighted_rows::WeightedRows;
use crate::autodiff::inner_of;

/// Returns [`cross_entropy`](super::cross_entropy), with the same ignored targets, of a vocabulary of this size, whose logits are
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
    smoothed_split_cross_entropy(logits, targets, 0.0, vocabulary, tensor)
}

/// Like [`split_cross_entropy`], with the label smoothing of
/// [`smoothed_cross_entropy`](super::smoothed_cross_entropy).
///
/// # Panics
/// As [`split_cross_entropy`].
pub fn smoothed_split_cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    share: f64,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> Tensor<1> {
    if tensor.ranks() == 1 {
        return smoothed_cross_entropy(logits, targets, share);
    }
    let ([rows, _], smoothing) = (logits.dims(), Smoothing::new(share, vocabulary));
    let weights = inner_of(weights_of_valid(targets.clone(), IGNORED_TARGET));
    loss(logits, WeightedRows::of(rows, targets, weights), smoothing, vocabulary, tensor)
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
    let rows = WeightedRows::of(rows, targets, inner_of(weights));
    loss(logits, rows, Smoothing::NONE, vocabulary, tensor)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData, Tolerance};

    use super::super::check::{numbers, on_ranks};
    use super::super::cross_entropy::cross_entropy;
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
    fn smoothed_targets_are_those_of_the_whole_vocabulary() {
        let targets = [0, -100, 9, 5, 3];
        for of in [(2, 1.0), (4, 5.0)] {
            check(
                [5, 10],
                of,
                |logits| smoothed_cross_entropy(logits, ids(&targets), 0.1),
                |logits, tensor| smoothed_split_cross_entropy(logits, ids(&targets), 0.1, 10, tensor),
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
