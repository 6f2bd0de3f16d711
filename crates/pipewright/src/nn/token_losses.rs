//! The loss of each token of a language model, for losses of whole sequences.

use burn::tensor::{Int, Tensor};

use super::parallel::TensorParallel;
use super::targets::with_0_for_ignored;
use super::vocabulary_loss::losses;
use super::vocabulary_part::vocabulary_statistics;

/// Returns the cross entropy of each row between `softmax(logits)` and its target id, in nats: the negative of
/// the target's log-probability. The logits of a vocabulary of this size are split over the ranks of `tensor`.
/// An ignored target ([`IGNORED_TARGET`](super::IGNORED_TARGET)) counts as the id 0.
///
/// Shapes: logits `[rows, part of the vocabulary]`, targets `[rows]`, result `[rows]`, which is equal on all
/// ranks and has at least single precision.
///
/// # Panics
/// When a target is outside the vocabulary, the number of targets differs from the number of rows, or a rank
/// of the group fails.
pub fn split_token_losses(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    vocabulary: usize,
    tensor: &TensorParallel,
) -> Tensor<1> {
    if tensor.ranks() == 1 {
        return statistics_token_losses(vocabulary_statistics(
            logits,
            targets,
            (0..vocabulary, vocabulary),
            None,
        ));
    }
    let [rows, _] = logits.dims();
    losses(logits, with_0_for_ignored(targets), vocabulary, tensor).reshape([rows])
}

/// Returns the cross entropy of each row from its statistics after the last part of the vocabulary
/// ([`vocabulary_statistics`]).
///
/// Shapes: statistics `[rows, 2]`, result `[rows]`.
pub fn statistics_token_losses(statistics: Tensor<2>) -> Tensor<1> {
    let [rows, _] = statistics.dims();
    (statistics.clone().narrow(1, 0, 1) - statistics.narrow(1, 1, 1)).reshape([rows])
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData, Tolerance};

    use super::*;
    use crate::nn::weighted_cross_entropy;

    /// The mean of the token losses, weighted by any numbers, has the gradient of the weighted cross entropy.
    #[test]
    fn token_losses_have_the_gradients_of_the_whole_loss() {
        let device = Device::flex().autodiff();
        let logits = || {
            let values: Vec<f32> = (0..15).map(|index| (index as f32 * 0.7).sin()).collect();
            Tensor::<2>::from_data(TensorData::new(values, [3, 5]), &device).require_grad()
        };
        let targets = || Tensor::<1, Int>::from_data([4, 0, 2], &device);
        let weights = || Tensor::<1>::from_data([0.5, 1.0, 2.5], &device);
        let (one, other) = (logits(), logits());
        let losses = split_token_losses(one.clone(), targets(), 5, &TensorParallel::default());
        let found = (losses * weights()).sum() / 4.0;
        let expected = weighted_cross_entropy(other.clone(), targets(), weights());
        let tolerance = Tolerance::<f32>::rel_abs(1e-6, 1e-6);
        found.clone().inner().into_data().assert_approx_eq(&expected.clone().inner().into_data(), tolerance);
        let (found, expected) = (found.backward(), expected.backward());
        let of = |tensor: &Tensor<2>, gradients| tensor.grad(gradients).expect("a gradient").into_data();
        of(&one, &found).assert_approx_eq(&of(&other, &expected), tolerance);
    }
}
