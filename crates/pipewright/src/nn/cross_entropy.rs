//! The training loss of a language model.

use burn::tensor::{Int, Tensor, activation};
use pipewright_kernel::cross_entropy::{backward, backward_bf16, forward, forward_bf16};

use super::composed::at_least_single;
use super::operation::{CpuTensor, Operation, elements, in_bf16, on_cpu, replace_elements};
use super::parallel::TensorParallel;
use super::targets::{IGNORED_TARGET, target_indices};
use super::vocabulary_loss::{WeightedRows, loss, weighted_sum};
use crate::autodiff::inner_of;
use crate::device::computes_behind;

/// Returns the mean over all rows of the cross entropy between `softmax(logits)` and the target ids, in nats.
/// Rows whose target is [`IGNORED_TARGET`](super::IGNORED_TARGET) do not count; the result is 0 if no row
/// counts.
///
/// Shapes: logits `[rows, vocabulary]`, targets `[rows]`, result `[1]`. Logits in half precision have a loss
/// in single precision. The backward pass writes their gradient into their memory, unless another tensor
/// shares it.
///
/// For the mean over all tokens of a step, each microbatch must count by its targets:
/// [`Batch::ignoring`](crate::batch::Batch::ignoring).
///
/// # Panics
/// When a target is outside the vocabulary, or the number of targets differs from the number of rows.
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let [rows, vocabulary] = logits.dims();
    let [found] = targets.dims();
    assert!(found == rows, "cross_entropy takes one target for each row, got {found} for {rows}");
    let Some(([logits], tape)) = on_cpu([logits.clone().into_dispatch()]) else {
        return on_device(logits, targets);
    };
    let targets = target_indices(targets, vocabulary);
    let (loss, normalisers) = match in_bf16([&logits]) {
        Some([logits]) => forward_bf16(logits, &targets, vocabulary),
        None => forward(&elements(&logits), &targets, vocabulary),
    };
    tape.in_single().record(vec![loss], [1], |_| CrossEntropyBackward { logits, targets, normalisers })
}

/// The operation for tensors that [`on_cpu`] does not take.
fn on_device(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let [rows, vocabulary] = logits.dims();
    let weights = inner_of(weights_of_valid(targets.clone(), IGNORED_TARGET));
    loss(logits, WeightedRows::of(rows, targets, weights), vocabulary, &TensorParallel::default())
}

#[derive(Clone, Debug)]
struct CrossEntropyBackward {
    logits: CpuTensor,
    targets: Vec<usize>,
    normalisers: Vec<f32>,
}

impl Operation<1> for CrossEntropyBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { mut logits, targets, normalisers } = self;
        let gradient = elements(&gradient)[0];
        replace_elements(
            &mut logits,
            |logits| backward(logits, &targets, &normalisers, gradient),
            |logits| backward_bf16(logits, &targets, &normalisers, gradient),
        );
        [Some(logits)]
    }
}

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
        return loss(logits, rows, vocabulary, &TensorParallel::default());
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

    use super::super::check::{check, numbers};
    use super::*;
    use crate::autodiff::on_tape_of;

    fn composed(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        let weights = on_tape_of(weights_of_valid(targets.clone(), IGNORED_TARGET), &logits);
        weighted_cross_entropy(logits, targets, weights)
    }

    fn check_at(scale: f32) {
        let targets = || Tensor::from_data(TensorData::new(vec![0i64, 19, 2, 1, 1, 3], [6]), &Device::flex());
        check(
            [numbers([6 * 20], scale)],
            |[x]| cross_entropy(x.reshape([6, 20]), targets()).unsqueeze(),
            |[x]| composed(x.reshape([6, 20]), targets()).unsqueeze(),
        );
    }

    #[test]
    fn equals_its_composition() {
        check_at(0.3);
        check_at(5.0);
    }

    #[test]
    fn large_logits_stay_finite() {
        check_at(300.0);
    }

    /// Compares a loss with ignored targets with the loss of the other rows, and with its composition.
    fn check_ignoring(targets: &[i64]) {
        let ids = |ids: Vec<i64>| {
            let count = ids.len();
            Tensor::<1, Int>::from_data(TensorData::new(ids, [count]), &Device::flex())
        };
        let rows = targets.len();
        let counted: Vec<usize> = (0..rows).filter(|row| targets[*row] != IGNORED_TARGET).collect();
        let of_counted = |x: Tensor<2>| {
            let parts = counted.iter().map(|&row| x.clone().narrow(0, row, 1)).collect();
            cross_entropy(Tensor::cat(parts, 0), ids(counted.iter().map(|&row| targets[row]).collect()))
        };
        let loss =
            |[x]: [Tensor<1>; 1]| cross_entropy(x.reshape([rows, 20]), ids(targets.to_vec())).unsqueeze();
        let composition =
            |[x]: [Tensor<1>; 1]| composed(x.reshape([rows, 20]), ids(targets.to_vec())).unsqueeze();
        check([numbers([rows * 20], 3.0)], loss, |[x]| of_counted(x.reshape([rows, 20])).unsqueeze());
        check([numbers([rows * 20], 3.0)], loss, composition);
    }

    #[test]
    fn ignored_targets_do_not_count() {
        check_ignoring(&[0, IGNORED_TARGET, 2, IGNORED_TARGET, IGNORED_TARGET, 3]);
        check_ignoring(&[IGNORED_TARGET, 19]);
    }

    #[test]
    fn without_any_target_the_loss_and_its_gradient_are_0() {
        let device = Device::flex().autodiff();
        let logits = numbers([2, 5], 1.0).to_data();
        let logits = Tensor::<2>::from_data(logits, &device).require_grad();
        let loss =
            cross_entropy(logits.clone(), Tensor::from_data([IGNORED_TARGET, IGNORED_TARGET], &device));
        assert_eq!(loss.clone().inner().into_scalar::<f32>(), 0.0);
        let gradient = logits.grad(&loss.backward()).expect("it is a leaf");
        assert_eq!(gradient.into_data(), TensorData::zeros::<f32, _>([2, 5]));
    }

    #[test]
    #[should_panic(expected = "outside the vocabulary of 3")]
    fn a_negative_target_that_is_not_ignored_is_refused() {
        let device = Device::flex();
        cross_entropy(Tensor::zeros([1, 3], &device), Tensor::from_data([-1], &device));
    }

    #[test]
    #[should_panic(expected = "outside the vocabulary of 3")]
    fn a_target_beyond_the_vocabulary_is_refused() {
        let device = Device::flex();
        cross_entropy(Tensor::zeros([1, 3], &device), Tensor::from_data([3], &device));
    }

    fn logits(rows: usize) -> Tensor<2> {
        let values: Vec<f32> = (0..rows * 5).map(|index| (index as f32 * 0.7).sin()).collect();
        Tensor::from_data(TensorData::new(values, [rows, 5]), &Device::flex().autodiff()).require_grad()
    }

    fn ids(ids: &[i64]) -> Tensor<1, Int> {
        Tensor::from_data(TensorData::new(ids.to_vec(), [ids.len()]), &Device::flex().autodiff())
    }

    fn check_weighted(targets: &[i64], weights: &[f32], expected: impl FnOnce(Tensor<2>) -> Tensor<1>) {
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
        check_weighted(&[1, 4, 0], &[0.5, 0.5, 0.5], |logits| cross_entropy(logits, ids(&[1, 4, 0])));
    }

    #[test]
    fn rows_of_weight_0_do_not_count() {
        check_weighted(&[1, -100, 0], &[1.0, 0.0, 1.0], |logits| {
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
        check_weighted(&[1, 4], &[3.0, 1.0], |logits| {
            let first = logits.clone().narrow(0, 0, 1);
            let repeated = Tensor::cat(vec![first.clone(), first.clone(), first, logits.narrow(0, 1, 1)], 0);
            cross_entropy(repeated, ids(&[1, 1, 1, 4]))
        });
    }

    #[test]
    fn nothing_valid_is_a_loss_of_0() {
        check_weighted(&[-100, 7], &[0.0, 0.0], |logits| logits.sum() * 0.0);
    }

    /// Other devices compute the same loss as the processor.
    #[test]
    fn the_loss_on_devices_equals_the_composition() {
        let check = |targets: &[i64], weights: &[f32]| {
            let rows = targets.len();
            let on_device = |logits: Tensor<2>| {
                let weights = Tensor::from_floats(weights, &Device::flex());
                let rows = WeightedRows::of(rows, ids(targets).inner(), weights);
                loss(logits, rows, 5, &TensorParallel::default())
            };
            compare(rows, on_device, |logits| weighted(logits, targets, weights));
        };
        check(&[1, 4, 0], &[0.5, 2.0, 1.0]);
        check(&[1, -100, 7, 3], &[1.0, 0.0, 0.0, 0.25]);
        check(&[-100, 7], &[0.0, 0.0]);
    }
}
