//! The training loss of a language model whose tokens have weights.

use burn::tensor::{Int, Tensor, activation};
use pipewright_kernel::cross_entropy::Smoothing;

use super::composed::at_least_single;
use super::parallel::TensorParallel;
use super::vocabulary_loss::loss;
use super::weighted_rows::{WeightedRows, weighted_sum};
use crate::autodiff::inner_of;
use crate::device::computes_behind;

/// Returns the mean, weighted by `weights`, over all rows of the cross entropy between `softmax(logits)` and
/// the target ids, in nats; 0 if all weights are 0. Rows of weight 0 do not count, and their targets may be
/// any numbers.
///
/// Shapes: logits `[rows, vocabulary]`, targets `[rows]`, weights `[rows]`, result `[1]`. The loss has at
/// least single precision.
///
/// [`split_weighted_cross_entropy`](super::split_weighted_cross_entropy) is the same for logits that are
/// split over the ranks of a tensor group.
///
/// The loss of a step is the mean over its microbatches. For the mean over all tokens of the batch, each
/// microbatch must count by its weights: [`Batch::ignoring`](crate::batch::Batch::ignoring),
/// [`Batch::with_token_weights`](crate::batch::Batch::with_token_weights).
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use pipewright::nn::{weighted_cross_entropy, weights_of_valid};
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::zeros([3, 4], &device);
/// let targets = Tensor::<1, Int>::from_data([1, -100, 2], &device);
/// let loss = weighted_cross_entropy(logits, targets.clone(), weights_of_valid(targets, -100));
/// assert!((loss.into_scalar::<f32>() - 4f32.ln()).abs() < 1e-6);
/// ```
///
/// # Panics
/// When the number of targets or of weights differs from the number of rows.
pub fn weighted_cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>, weights: Tensor<1>) -> Tensor<1> {
    let [rows, vocabulary] = logits.dims();
    if computes_behind(&logits.device()) && !weights.is_tracked() {
        let rows = WeightedRows::of(rows, targets, inner_of(weights));
        return loss(logits, rows, Smoothing::NONE, vocabulary, &TensorParallel::default());
    }
    let logits = at_least_single(logits);
    let WeightedRows { targets, weights, whole } =
        WeightedRows::of(rows, targets, weights.cast(logits.dtype()));
    let losses = activation::log_softmax(logits, 1).gather(1, targets.unsqueeze_dim(1)).reshape([rows]).neg();
    weighted_sum(losses, weights) / whole
}

/// Returns weights of 1 for the targets that are not `ignored`, and 0 for the others.
pub fn weights_of_valid(targets: Tensor<1, Int>, ignored: i64) -> Tensor<1> {
    targets.not_equal_elem(ignored).float()
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::nn::cross_entropy;

    fn logits(rows: usize) -> Tensor<2> {
        let values: Vec<f32> = (0..rows * 5).map(|index| (index as f32 * 0.7).sin()).collect();
        Tensor::from_data(TensorData::new(values, [rows, 5]), &Device::flex().autodiff()).require_grad()
    }

    fn ids(ids: &[i64]) -> Tensor<1, Int> {
        Tensor::from_data(TensorData::new(ids.to_vec(), [ids.len()]), &Device::flex().autodiff())
    }

    fn check(targets: &[i64], weights: &[f32], expected: impl FnOnce(Tensor<2>) -> Tensor<1>) {
        compare(targets.len(), |logits| weighted(logits, targets, weights), expected);
    }

    fn weighted(logits: Tensor<2>, targets: &[i64], weights: &[f32]) -> Tensor<1> {
        let weights = Tensor::from_floats(weights, &Device::flex().autodiff());
        weighted_cross_entropy(logits, ids(targets), weights)
    }

    /// Compares two losses of the same logits, and their gradients.
    fn compare(
        rows: usize,
        found: impl FnOnce(Tensor<2>) -> Tensor<1>,
        expected: impl FnOnce(Tensor<2>) -> Tensor<1>,
    ) {
        let (one, other) = (logits(rows), logits(rows));
        let (found, expected) = (found(one.clone()), expected(other.clone()));
        let close = |a: Tensor<2>, b: Tensor<2>| {
            a.into_data()
                .assert_approx_eq::<f32>(&b.into_data(), burn::tensor::Tolerance::rel_abs(1e-5, 1e-6));
        };
        close(found.clone().inner().unsqueeze(), expected.clone().inner().unsqueeze());
        let (found, expected) = (found.backward(), expected.backward());
        close(one.grad(&found).expect("a gradient"), other.grad(&expected).expect("a gradient"));
    }

    #[test]
    fn equal_weights_make_the_mean() {
        check(&[1, 4, 0], &[0.5, 0.5, 0.5], |logits| cross_entropy(logits, ids(&[1, 4, 0])));
    }

    #[test]
    fn rows_of_weight_0_do_not_count() {
        check(&[1, -100, 0], &[1.0, 0.0, 1.0], |logits| {
            let valid = Tensor::cat(vec![logits.clone().narrow(0, 0, 1), logits.narrow(0, 2, 1)], 0);
            cross_entropy(valid, ids(&[1, 0]))
        });
    }

    #[test]
    fn the_first_id_may_be_masked_in_rows_of_weight_0() {
        let masked = |logits: Tensor<2>| {
            let rest = logits.clone().narrow(1, 1, 4);
            Tensor::cat(vec![logits.narrow(1, 0, 1).full_like(f32::NEG_INFINITY), rest], 1)
        };
        compare(
            3,
            |logits| weighted(masked(logits), &[1, -100, 4], &[1.0, 0.0, 3.0]),
            |logits| {
                let valid = Tensor::cat(vec![logits.clone().narrow(0, 0, 1), logits.narrow(0, 2, 1)], 0);
                weighted(masked(valid), &[1, 4], &[1.0, 3.0])
            },
        );
    }

    #[test]
    fn weights_count_as_repetitions() {
        check(&[1, 4], &[3.0, 1.0], |logits| {
            let first = logits.clone().narrow(0, 0, 1);
            let repeated = Tensor::cat(vec![first.clone(), first.clone(), first, logits.narrow(0, 1, 1)], 0);
            cross_entropy(repeated, ids(&[1, 1, 1, 4]))
        });
    }

    #[test]
    fn nothing_valid_is_a_loss_of_0() {
        check(&[-100, 7], &[0.0, 0.0], |logits| logits.sum() * 0.0);
    }

    /// Other devices compute the same loss as the processor.
    #[test]
    fn the_loss_on_devices_equals_the_composition() {
        let check = |targets: &[i64], weights: &[f32]| {
            let rows = targets.len();
            let on_device = |logits: Tensor<2>| {
                let weights = Tensor::from_floats(weights, &Device::flex());
                let rows = WeightedRows::of(rows, ids(targets).inner(), weights);
                loss(logits, rows, Smoothing::NONE, 5, &TensorParallel::default())
            };
            compare(rows, on_device, |logits| weighted(logits, targets, weights));
        };
        check(&[1, 4, 0], &[0.5, 2.0, 1.0]);
        check(&[1, -100, 7, 3], &[1.0, 0.0, 0.0, 0.25]);
        check(&[-100, 7], &[0.0, 0.0]);
    }
}
