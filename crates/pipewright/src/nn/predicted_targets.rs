//! Counts the targets that a language model predicts, for the accuracy of an evaluation.

use burn::tensor::{Int, Tensor};

use super::composed::at_least_single;
use super::parallel::TensorParallel;
use super::targets::IGNORED_TARGET;
use crate::autodiff::inner_of;

/// The name of the counts of [`predicted_targets`] in the report of an evaluation
/// ([`EvalSummary::counts`](crate::pipeline::EvalSummary::counts)).
pub const PREDICTED_TARGETS: &str = "predicted_targets";

/// Returns the number of rows whose target has the largest logit, and the number of rows that count, which are the rows whose target is not [`IGNORED_TARGET`](super::IGNORED_TARGET). If several logits of a row are the largest, the one
/// with the lowest id counts as the prediction.
///
/// Shapes: logits `[rows, part of the vocabulary]`, for the rank's part of a vocabulary of this size, targets `[rows]`.
/// The result is equal on all ranks.
///
/// # Panics
/// When the number of targets differs from the number of rows, or a rank of the group fails.
pub fn predicted_targets(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> [u64; 2] {
    let [rows, _] = logits.dims();
    assert_eq!(targets.dims(), [rows], "one target per row");
    let values = at_least_single(inner_of(logits));
    let (range, targets) = (tensor.range(vocabulary), targets.inner());
    let chosen = values.clone().argmax(1).reshape([rows]) + range.start as i64;
    let hits = chosen.equal(targets.clone()).float().cast(values.dtype()).unsqueeze_dim::<2>(1);
    let own = Tensor::cat(vec![values.max_dim(1), hits], 1);
    let of_ranks = if tensor.ranks() == 1 { vec![own] } else { tensor.all_gather(own) };
    let of_ranks: Vec<Vec<f32>> =
        of_ranks.into_iter().map(|rank| rank.into_data().iter::<f32>().collect()).collect();
    let is_predicted = |row: usize| {
        let candidates = of_ranks.iter().map(|rank| (rank[2 * row], rank[2 * row + 1]));
        let best = candidates.reduce(|best, next| if next.0 > best.0 { next } else { best });
        best.is_some_and(|(_, hit)| hit > 0.0)
    };
    let counted = targets.into_data();
    let counted = counted.iter::<i64>().enumerate().filter(|(_, target)| *target != IGNORED_TARGET);
    counted.fold([0, 0], |[hits, all], (row, _)| [hits + u64::from(is_predicted(row)), all + 1])
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::super::check::{numbers, on_ranks};
    use super::*;

    fn check(logits: &Tensor<2>, targets: [i64; 4], expected: [u64; 2]) {
        let [_, vocabulary] = logits.dims();
        let targets = || Tensor::from_data(TensorData::new(targets.to_vec(), [4]), &Device::flex());
        let alone = TensorParallel::default();
        assert_eq!(predicted_targets(logits.clone(), targets(), vocabulary, &alone), expected);
        for ranks in [2, 4] {
            let found = on_ranks(ranks, |tensor| {
                let range = tensor.range(vocabulary);
                let own = logits.clone().narrow(1, range.start, range.len());
                predicted_targets(own, targets(), vocabulary, &tensor)
            });
            assert_eq!(found, vec![expected; ranks as usize]);
        }
    }

    #[test]
    fn targets_with_the_largest_logit_are_predicted() {
        let logits = numbers([4, 10], 3.0);
        let best: Vec<i64> = logits.clone().argmax(1).into_data().iter().collect();
        let best = [best[0], best[1], best[2], best[3]];
        check(&logits, best, [4, 4]);
        check(&logits, [best[0], (best[1] + 1) % 10, best[2], IGNORED_TARGET], [2, 3]);
        check(&logits, [IGNORED_TARGET; 4], [0, 0]);
    }

    #[test]
    fn of_equal_logits_the_lowest_id_is_the_prediction() {
        check(&Tensor::ones([4, 10], &Device::flex()), [0, 1, 9, 0], [2, 4]);
    }
}
