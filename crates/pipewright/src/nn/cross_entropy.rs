//! The training loss of a language model.

use burn::tensor::{Int, Tensor};
use pipewright_kernel::cross_entropy::{Smoothing, backward, backward_bf16, forward, forward_bf16};

use super::operation::{CpuTensor, Operation, elements, in_bf16, on_cpu, replace_elements};
use super::parallel::TensorParallel;
use super::targets::{IGNORED_TARGET, target_indices};
use super::vocabulary_loss::loss;
use super::weighted_cross_entropy::weights_of_valid;
use super::weighted_rows::WeightedRows;
use crate::autodiff::inner_of;

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
    smoothed_cross_entropy(logits, targets, 0.0)
}

/// Like [`cross_entropy`], with label smoothing: a target has the probability `1 - share`, and all ids together the rest
/// in equal parts, the target among them. The loss of a row is `log sum exp(logits) - (1 - share) logits[target] - share
/// mean(logits)`, as in PyTorch (`label_smoothing`) and transformers (`LabelSmoother`).
///
/// # Panics
/// As [`cross_entropy`].
pub fn smoothed_cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>, share: f64) -> Tensor<1> {
    let [rows, vocabulary] = logits.dims();
    let [found] = targets.dims();
    assert!(found == rows, "cross_entropy takes one target for each row, got {found} for {rows}");
    let Some(([logits], tape)) = on_cpu([logits.clone().into_dispatch()]) else {
        return on_device(logits, targets, share);
    };
    let smoothing = Smoothing::new(share, vocabulary);
    let targets = target_indices(targets, vocabulary);
    let (loss, normalisers) = match in_bf16([&logits]) {
        Some([logits]) => forward_bf16(logits, &targets, vocabulary, smoothing),
        None => forward(&elements(&logits), &targets, vocabulary, smoothing),
    };
    let backward = |_: &CpuTensor| CrossEntropyBackward { logits, targets, normalisers, smoothing };
    tape.in_single().record(vec![loss], [1], backward)
}

/// The operation for tensors that [`on_cpu`] does not take.
fn on_device(logits: Tensor<2>, targets: Tensor<1, Int>, share: f64) -> Tensor<1> {
    let [rows, vocabulary] = logits.dims();
    let weights = inner_of(weights_of_valid(targets.clone(), IGNORED_TARGET));
    let rows = WeightedRows::of(rows, targets, weights);
    loss(logits, rows, Smoothing::new(share, vocabulary), vocabulary, &TensorParallel::default())
}

#[derive(Clone, Debug)]
struct CrossEntropyBackward {
    logits: CpuTensor,
    targets: Vec<usize>,
    normalisers: Vec<f32>,
    smoothing: Smoothing,
}

impl Operation<1> for CrossEntropyBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { mut logits, targets, normalisers, smoothing } = self;
        let gradient = elements(&gradient)[0];
        replace_elements(
            &mut logits,
            |logits| backward(logits, &targets, &normalisers, smoothing, gradient),
            |logits| backward_bf16(logits, &targets, &normalisers, smoothing, gradient),
        );
        [Some(logits)]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData, activation};

    use super::super::check::{check, numbers};
    use super::super::weighted_cross_entropy::weighted_cross_entropy;
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
    fn smoothed_targets_equal_their_composition() {
        for share in [0.1, 0.5] {
            let targets = || Tensor::from_data([0, IGNORED_TARGET, 19, 1], &Device::flex());
            let logits = |x: Tensor<1>| x.reshape([4, 20]);
            for scale in [0.3, 5.0] {
                check(
                    [numbers([4 * 20], scale)],
                    |[x]| smoothed_cross_entropy(logits(x), targets(), share).unsqueeze(),
                    |[x]| {
                        let losses = activation::log_softmax(logits(x.clone()), 1).neg();
                        let counted =
                            Tensor::cat(vec![losses.clone().narrow(0, 0, 1), losses.narrow(0, 2, 2)], 0);
                        let of_all = counted.mean() * share;
                        (composed(logits(x), targets()) * (1.0 - share) + of_all).unsqueeze()
                    },
                );
            }
        }
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
}
