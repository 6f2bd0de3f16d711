//! The training loss of a language model whose vocabulary is split over the ranks of a tensor group.
//!
//! Each rank has the logits of its part of the vocabulary. The ranks exchange three numbers for each row: the largest
//! logit, the sum of the exponentials relative to it, and the logit of the target or zero. Each rank then computes the
//! loss, and in the backward the gradient of its own logits.

use std::sync::Arc;

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor};

use super::composed::at_least_single;
use super::cross_entropy::cross_entropy;
use super::embedding::local_ids;
use super::parallel::TensorParallel;
use crate::autodiff::{Rule, inner_of, record};

/// Returns [`cross_entropy`] of a vocabulary of this size, whose logits are split over the ranks of `tensor`.
///
/// Shapes: logits `[rows, part of the vocabulary]`, targets `[rows]`, result `[1]`, which is equal on all ranks.
///
/// # Panics
/// When a target is outside the vocabulary, the number of targets is not that of the rows, or a rank of the group fails.
pub fn split_cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> Tensor<1> {
    if tensor.ranks() == 1 {
        return cross_entropy(logits, targets);
    }
    let [rows, _] = logits.dims();
    assert_eq!(targets.dims(), [rows], "one target a row");
    let (places, presence) = local_ids(targets, vocabulary, tensor);
    let (places, presence) = (places.unsqueeze_dim::<2>(1), presence.float().unsqueeze_dim::<2>(1));
    let precision = logits.dtype();
    let values = at_least_single(inner_of(logits.clone()));
    let presence = presence.cast(values.dtype());

    // A row of which this rank has only masked logits.
    let largest = values.clone().max_dim(1).clamp_min(f32::MIN);
    let sums = (values.clone() - largest.clone()).exp().sum_dim(1);
    let target = values.clone().gather(1, places.clone()).mask_fill(presence.clone().equal_elem(0.0), 0.0);
    let of_ranks = tensor.all_gather(Tensor::cat(vec![largest, sums, target], 1));
    let column = |index: usize| of_ranks.iter().map(move |rank| rank.clone().narrow(1, index, 1));
    let largest = column(0).reduce(Tensor::max_pair).expect("a group has this rank");
    let scaled = column(1).zip(column(0)).map(|(sum, own)| sum * (own - largest.clone()).exp());
    let sum = scaled.reduce(|sum, part| sum + part).expect("a group has this rank");
    let target = column(2).reduce(|sum, part| sum + part).expect("a group has this rank");
    let normalisers = largest + sum.log();
    let loss = (normalisers.clone() - target).mean().reshape([1, 1]);
    let rule = LossRule { logits: values, normalisers, places, presence, precision };
    record([logits.clone(), logits], loss, Arc::new(rule)).reshape([1])
}

#[derive(Debug)]
struct LossRule {
    logits: Tensor<2>,
    /// The logarithm of the sum of the exponentials of all logits of a row.
    normalisers: Tensor<2>,
    places: Tensor<2, Int>,
    presence: Tensor<2>,
    precision: DType,
}

impl Rule for LossRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let Self { logits, normalisers, places, presence, precision } = self;
        let [rows, _] = logits.dims();
        let probabilities = (logits.clone() - normalisers.clone()).exp();
        let targets = presence.clone().neg();
        let difference = probabilities.scatter(1, places.clone(), targets, IndexingUpdateOp::Add);
        let gradient = difference * gradient.cast(logits.dtype()) / rows as f64;
        [Some(if *precision == gradient.dtype() { gradient } else { gradient.cast(*precision) }), None]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData, Tolerance};

    use super::super::check::numbers;
    use super::super::parallel::tests::on_ranks;
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

    #[test]
    fn the_loss_and_its_gradient_are_those_of_the_whole_vocabulary() {
        let targets =
            || Tensor::from_data(TensorData::new(vec![0i64, 19, 2, 9, 10, 3], [6]), &Device::flex());
        for (ranks, scale) in [(2, 0.3), (3, 5.0), (4, 300.0)] {
            let whole = numbers([6, 20], scale).autodiff().require_grad();
            let loss = cross_entropy(whole.clone(), targets());
            let expected = whole.grad(&loss.clone().backward()).expect("it is a leaf");
            let found = on_ranks(ranks, |tensor| {
                let range = tensor.range(20);
                let own = numbers([6, 20], scale).narrow(1, range.start, range.len());
                let own = own.autodiff().require_grad();
                let loss = split_cross_entropy(own.clone(), targets(), 20, &tensor);
                let gradient = own.grad(&loss.clone().backward()).expect("it is a leaf");
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
    }
}
