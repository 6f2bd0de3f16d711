//! The training loss of a language model whose vocabulary is cut into parts that are computed one after
//! another, each by a layer of its own.
//!
//! A part adds its logits to the statistics of the parts before it ([`vocabulary_statistics`]), and the
//! statistics after the last part give the loss ([`statistics_loss`]). No part sees the logits of another
//! one: the statistics are two numbers of each row. This is the idea of vocabulary parallelism (Yeung, Qi,
//! Lin and Wan, 2024, arXiv:2411.05288) in a form for stages that compute one after another.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};
use pipewright_kernel::cross_entropy::Smoothing;
use pipewright_kernel::vocabulary_part::{NOTHING, backward, backward_bf16, forward, forward_bf16};

use super::composed::at_least_single;
use super::embedding::local_ids;
use super::operation::{
    CpuTensor, Operation, cpu_tensor, elements, in_bf16, indices, on_cpu, replace_elements,
};
use super::targets::{IGNORED_TARGET, with_0_for_ignored};
use super::vocabulary_loss::compared;
use super::weighted_cross_entropy::weights_of_valid;
use super::weighted_rows::{WeightedRows, weighted_sum};
use crate::autodiff::{Rule, inner_of, on_tape_of, record};

/// Returns the statistics of rows after a part of the vocabulary: the logarithm of the sum of the
/// exponentials of all logits so far, and the logit of the target, or 0 as long as no part had it. `earlier`
/// has the statistics after the part before; the first part has no statistics before it.
///
/// Shapes: logits `[rows, part]`, for the token ids `range`, targets `[rows]`, statistics `[rows, 2]`. The
/// statistics have at least single precision. A target that is ignored
/// ([`IGNORED_TARGET`](super::IGNORED_TARGET)) counts as 0, and its row does not count in
/// [`statistics_loss`].
///
/// # Panics
/// When a target is outside the vocabulary, or the shapes do not fit each other. Only the CPU back end checks
/// the targets.
pub fn vocabulary_statistics(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    of_part: (Range<usize>, usize),
    earlier: Option<Tensor<2>>,
) -> Tensor<2> {
    smoothed_vocabulary_statistics(logits, targets, 0.0, of_part, earlier)
}

/// Like [`vocabulary_statistics`], with the label smoothing of
/// [`smoothed_cross_entropy`](super::smoothed_cross_entropy): the mean of the logits so far under the distribution of the
/// target takes the place of its logit.
///
/// # Panics
/// As [`vocabulary_statistics`].
pub fn smoothed_vocabulary_statistics(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    share: f64,
    (range, vocabulary): (Range<usize>, usize),
    earlier: Option<Tensor<2>>,
) -> Tensor<2> {
    let smoothing = Smoothing::new(share, vocabulary);
    let [rows, width] = logits.dims();
    assert_eq!(targets.dims(), [rows], "one target per row");
    assert_eq!(width, range.len(), "one logit for each token id of the part");
    let earlier = earlier.unwrap_or_else(|| nothing(rows, &logits));
    assert_eq!(earlier.dims(), [rows, 2], "two statistics a row");
    let targets = with_0_for_ignored(targets);
    let operands = [logits.clone().into_dispatch(), earlier.clone().into_dispatch()];
    let Some(([logits, earlier], tape)) = on_cpu(operands) else {
        return composed(logits, targets, smoothing, (range, vocabulary), earlier);
    };
    let ids = indices(targets);
    assert!(ids.iter().all(|&id| id < vocabulary), "a target lies outside the vocabulary of {vocabulary}");
    // The column of an id of an earlier part wraps to one that is larger than all columns.
    let columns: Vec<usize> = ids.iter().map(|id| id.wrapping_sub(range.start)).collect();
    let later = match in_bf16([&logits]) {
        Some([logits]) => forward_bf16(logits, &columns, &elements(&earlier), smoothing),
        None => forward(&elements(&logits), &columns, &elements(&earlier), smoothing),
    };
    let tape = tape.in_single();
    tape.record(later, [rows, 2], |later| StatisticsBackward {
        logits,
        columns,
        earlier,
        later: later.clone(),
        smoothing,
    })
}

/// Returns the mean loss of the rows whose targets are not ignored
/// ([`IGNORED_TARGET`](super::IGNORED_TARGET)), in nats, from their statistics after the last part of the
/// vocabulary; 0 if all are ignored.
///
/// The loss of a row is the difference of its two statistics, for a loss that weighs rows.
///
/// Shapes: statistics `[rows, 2]`, targets `[rows]`, result `[1]`.
///
/// # Panics
/// When the number of targets differs from the number of rows.
pub fn statistics_loss(statistics: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let [rows, _] = statistics.dims();
    assert_eq!(targets.dims(), [rows], "one target per row");
    let Some(([values], tape)) = on_cpu([statistics.clone().into_dispatch()]) else {
        return composed_loss(statistics, targets);
    };
    let counts: Vec<bool> = targets.into_data().iter::<i64>().map(|id| id != IGNORED_TARGET).collect();
    let count = counts.iter().filter(|counts| **counts).count().max(1);
    // The mean is computed in f64, as in `cross_entropy`.
    let losses = elements(&values)
        .as_chunks()
        .0
        .iter()
        .zip(&counts)
        .filter(|(_, counts)| **counts)
        .map(|(&[all, target], _)| f64::from(all) - f64::from(target))
        .sum::<f64>();
    tape.record(vec![(losses / count as f64) as f32], [1], |_| LossBackward { counts, count })
}

fn composed_loss(statistics: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let [rows, _] = statistics.dims();
    let losses = (statistics.clone().narrow(1, 0, 1) - statistics.narrow(1, 1, 1)).reshape([rows]);
    let weights = weights_of_valid(targets.clone(), IGNORED_TARGET);
    let weights = on_tape_of(weights.cast(losses.dtype()), &losses);
    let WeightedRows { weights, whole, .. } = WeightedRows::of(rows, targets, weights);
    weighted_sum(losses, weights) / whole
}

/// Returns the statistics before the first part.
fn nothing(rows: usize, logits: &Tensor<2>) -> Tensor<2> {
    let device: Device = logits.device().inner();
    let values = Tensor::<2>::from_data(TensorData::new(NOTHING.repeat(rows), [rows, 2]), &device);
    // Double precision has its own statistics.
    if logits.dtype() == DType::F64 { values.cast(DType::F64) } else { values }
}

#[derive(Clone, Debug)]
struct StatisticsBackward {
    logits: CpuTensor,
    columns: Vec<usize>,
    earlier: CpuTensor,
    later: CpuTensor,
    smoothing: Smoothing,
}

impl Operation<2> for StatisticsBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 2]) -> [Option<CpuTensor>; 2] {
        let Self { mut logits, columns, earlier, later, smoothing } = self;
        let (before, after, gradient) = (elements(&earlier), elements(&later), elements(&gradient));
        let statistics: (&[f32], &[f32]) = (&before, &after);
        let d_earlier = replace_elements(
            &mut logits,
            |logits| backward(logits, &columns, statistics, smoothing, &gradient),
            |logits| backward_bf16(logits, &columns, statistics, smoothing, &gradient),
        );
        [Some(logits), Some(cpu_tensor(d_earlier, earlier.layout().shape().clone()))]
    }
}

#[derive(Clone, Debug)]
struct LossBackward {
    /// Whether each row counts.
    counts: Vec<bool>,
    /// The number of rows that count, at least 1.
    count: usize,
}

impl Operation<1> for LossBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let share = elements(&gradient)[0] / self.count as f32;
        let of_row = |counts: &bool| if *counts { [share, -share] } else { [0.0; 2] };
        [Some(cpu_tensor(self.counts.iter().flat_map(of_row).collect(), [self.counts.len(), 2]))]
    }
}

fn composed(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    smoothing: Smoothing,
    (range, vocabulary): (Range<usize>, usize),
    earlier: Tensor<2>,
) -> Tensor<2> {
    let (columns, presence) = local_ids(targets.inner(), vocabulary, range);
    let kept = inner_of(logits.clone());
    let values = at_least_single(kept.clone());
    let columns = columns.unsqueeze_dim::<2>(1);
    let presence = presence.unsqueeze_dim::<2>(1).float().cast(values.dtype());
    let before = inner_of(earlier.clone());
    let [normaliser, target] = [0, 1].map(|column| before.clone().narrow(1, column, 1));
    let largest = values.clone().max_dim(1).clamp_min(f32::MIN);
    let own = (values.clone() - largest.clone()).exp().sum_dim(1).log() + largest;
    let larger = own.clone().max_pair(normaliser.clone()).clamp_min(f32::MIN);
    let joined = ((own - larger.clone()).exp() + (normaliser - larger.clone()).exp()).log() + larger;
    let of_part = values.clone().gather(1, columns.clone()).mask_fill(presence.clone().equal_elem(0.0), 0.0);
    let target = target + compared(of_part, values, smoothing);
    let later = Tensor::cat(vec![joined.clone(), target], 1);
    let rule = StatisticsRule { logits: kept, columns, presence, earlier: before, later: joined, smoothing };
    record([logits, earlier], later, Arc::new(rule))
}

#[derive(Debug)]
struct StatisticsRule {
    /// In their own precision.
    logits: Tensor<2>,
    columns: Tensor<2, Int>,
    /// 1 for the rows whose target is in the part, 0 for the others.
    presence: Tensor<2>,
    earlier: Tensor<2>,
    /// The normalisers after the part.
    later: Tensor<2>,
    smoothing: Smoothing,
}

impl Rule for StatisticsRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let Self { logits, columns, presence, earlier, later, smoothing } = self;
        let [share, of_target] = [0, 1].map(|column| gradient.clone().narrow(1, column, 1));
        // Infinities have no difference. A share of 0 says that later parts have the logits that are not
        // masked.
        let later =
            later.clone().mask_where(share.clone().equal_elem(0.0), later.clone().clamp_min(f32::MIN));
        let scaled = (at_least_single(logits.clone()) - later.clone()).exp() * share.clone();
        let is_plain = *smoothing == Smoothing::NONE;
        let scaled = if is_plain { scaled } else { scaled + of_target.clone() * smoothing.each() };
        let at_target = of_target.clone() * presence.clone() * smoothing.target();
        let d_logits = scaled.scatter(1, columns.clone(), at_target, IndexingUpdateOp::Add);
        let before = (earlier.clone().narrow(1, 0, 1) - later).exp() * share;
        [Some(d_logits.cast(logits.dtype())), Some(Tensor::cat(vec![before, of_target], 1))]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tolerance;

    use super::super::check::{check, numbers};
    use super::super::{cross_entropy, smoothed_cross_entropy, weighted_cross_entropy};
    use super::*;

    const ROWS: usize = 6;
    const VOCABULARY: usize = 20;

    fn targets() -> Tensor<1, Int> {
        Tensor::from_data(TensorData::new(vec![0i64, 19, 7, 9, 10, 13], [ROWS]), &Device::flex())
    }

    /// Returns the statistics of all parts, which begin at these ids.
    fn statistics(logits: &Tensor<2>, starts: &[usize]) -> Tensor<2> {
        let ends = starts.iter().skip(1).copied().chain([VOCABULARY]);
        let parts = starts.iter().zip(ends).map(|(&start, end)| start..end);
        let statistics = parts.fold(None, |earlier, range| {
            let own = logits.clone().narrow(1, range.start, range.len());
            Some(vocabulary_statistics(own, targets(), (range, VOCABULARY), earlier))
        });
        statistics.expect("there is a part")
    }

    fn check_at(scale: f32) {
        for starts in [&[0][..], &[0, 7, 14], &[0, 1, 2, 19]] {
            check(
                [numbers([ROWS * VOCABULARY], scale)],
                |[x]| {
                    statistics_loss(statistics(&x.reshape([ROWS, VOCABULARY]), starts), targets()).unsqueeze()
                },
                |[x]| cross_entropy(x.reshape([ROWS, VOCABULARY]), targets()).unsqueeze(),
            );
        }
    }

    #[test]
    fn the_loss_of_parts_is_that_of_the_whole_vocabulary() {
        check_at(0.3);
        check_at(5.0);
        check_at(300.0);
    }

    #[test]
    fn smoothed_targets_are_those_of_the_whole_vocabulary() {
        check(
            [numbers([ROWS * VOCABULARY], 3.0)],
            |[x]| {
                let x = x.reshape([ROWS, VOCABULARY]);
                let part = |range: Range<usize>, earlier| {
                    let own = x.clone().narrow(1, range.start, range.len());
                    smoothed_vocabulary_statistics(own, targets(), 0.1, (range, VOCABULARY), earlier)
                };
                statistics_loss(part(7..20, Some(part(0..7, None))), targets()).unsqueeze()
            },
            |[x]| smoothed_cross_entropy(x.reshape([ROWS, VOCABULARY]), targets(), 0.1).unsqueeze(),
        );
    }

    #[test]
    fn ignored_targets_do_not_count() {
        let ids = [0, IGNORED_TARGET, IGNORED_TARGET, IGNORED_TARGET, 10, 13];
        let masked = || Tensor::<1, Int>::from_data(ids, &Device::flex());
        let statistics = |logits: &Tensor<2>| {
            let part = |range: Range<usize>| logits.clone().narrow(1, range.start, range.len());
            let first = vocabulary_statistics(part(0..7), masked(), (0..7, VOCABULARY), None);
            vocabulary_statistics(part(7..20), masked(), (7..20, VOCABULARY), Some(first))
        };
        for loss in [statistics_loss, composed_loss] {
            check(
                [numbers([ROWS * VOCABULARY], 3.0)],
                |[x]| loss(statistics(&x.reshape([ROWS, VOCABULARY])), masked()).unsqueeze(),
                |[x]| cross_entropy(x.reshape([ROWS, VOCABULARY]), masked()).unsqueeze(),
            );
        }
    }

    /// The gradients of the statistics differ from row to row, as in a weighted loss.
    #[test]
    fn rows_with_weights() {
        let weights = || Tensor::<1>::from_floats([0.5, 2.0, 0.0, 0.25, 3.0, 1.0], &Device::flex());
        check(
            [numbers([ROWS * VOCABULARY], 3.0)],
            |[x]| {
                let found = statistics(&x.reshape([ROWS, VOCABULARY]), &[0, 7, 14]);
                let losses = found.clone().narrow(1, 0, 1) - found.narrow(1, 1, 1);
                let weights = on_tape_of(weights(), &losses);
                let whole = weights.clone().sum();
                ((losses.reshape([ROWS]) * weights).sum() / whole).unsqueeze()
            },
            |[x]| {
                let x = x.reshape([ROWS, VOCABULARY]);
                let weights = on_tape_of(weights(), &x);
                weighted_cross_entropy(x, targets(), weights).unsqueeze()
            },
        );
    }

    #[test]
    fn targets_may_be_of_the_device_of_the_tape() {
        for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
            let leaf = || {
                let logits = numbers([2, 4], 1.0).into_data();
                Tensor::<2>::from_data(logits, &device).require_grad()
            };
            let targets = || Tensor::<1, Int>::from_data([3, 1], &device);
            let (parts, whole) = (leaf(), leaf());
            let found = vocabulary_statistics(parts.clone(), targets(), (0..4, 4), None);
            let found = parts.grad(&statistics_loss(found, targets()).backward()).expect("it is a leaf");
            let expected = whole.grad(&cross_entropy(whole.clone(), targets()).backward());
            let expected = expected.expect("it is a leaf").into_data();
            found.into_data().assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-5, 1e-6));
        }
    }

    /// The statistics differ in the last bits, but those before the first part do not spoil them.
    #[test]
    fn logits_of_a_part_may_be_masked() {
        let logits = numbers([ROWS, VOCABULARY], 1.0);
        let masked = Tensor::cat(
            vec![Tensor::full([ROWS, 7], f32::NEG_INFINITY, &Device::flex()), logits.narrow(1, 7, 13)],
            1,
        );
        let targets =
            || Tensor::from_data(TensorData::new(vec![7i64, 19, 7, 9, 10, 13], [ROWS]), &Device::flex());
        for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
            let leaf = Tensor::<2>::from_data(masked.to_data(), &device).require_grad();
            let statistics_of = |range: Range<usize>, earlier| {
                let own = leaf.clone().narrow(1, range.start, range.len());
                vocabulary_statistics(own, targets(), (range, VOCABULARY), earlier)
            };
            let first = statistics_of(0..7, None);
            let loss = statistics_loss(statistics_of(7..20, Some(first)), targets());
            let expected = cross_entropy(masked.clone(), targets());
            loss.clone()
                .inner()
                .into_data()
                .assert_approx_eq::<f32>(&expected.into_data(), Tolerance::rel_abs(1e-5, 1e-6));
            let gradient = leaf.grad(&loss.backward()).expect("it is a leaf");
            assert_eq!(gradient.narrow(1, 0, 7).into_data(), TensorData::zeros::<f32, _>([ROWS, 7]));
        }
    }

    /// Such a row has no loss, and the others have theirs.
    #[test]
    fn all_logits_of_a_row_may_be_masked() {
        let masked = Tensor::full([1, VOCABULARY], f32::NEG_INFINITY, &Device::flex());
        let masked = Tensor::cat(vec![masked, numbers([ROWS - 1, VOCABULARY], 1.0)], 0).into_data();
        for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
            let leaf = || Tensor::<2>::from_data(masked.clone(), &device).require_grad();
            let (parts, whole) = (leaf(), leaf());
            let losses = [
                statistics_loss(statistics(&parts, &[0, 7, 14]), targets()),
                cross_entropy(whole.clone(), targets()),
            ];
            assert!(
                losses.clone().map(|loss| loss.into_scalar::<f32>().is_nan()).iter().all(|is_nan| *is_nan)
            );
            let [parts, whole] = [(parts, &losses[0]), (whole, &losses[1])].map(|(leaf, loss)| {
                let gradient = leaf.grad(&loss.backward()).expect("it is a leaf").into_data();
                gradient.try_to_vec::<f32>().expect("single precision")
            });
            for (column, (part, whole)) in parts.into_iter().zip(whole).enumerate() {
                assert_eq!(
                    (part.is_nan(), whole.is_nan()),
                    (column < VOCABULARY, column < VOCABULARY),
                    "{column}"
                );
                assert!(column < VOCABULARY || (part - whole).abs() < 1e-6, "{column}: {part} {whole}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "outside the vocabulary of 20")]
    fn a_target_beyond_the_vocabulary_is_refused() {
        let targets = Tensor::from_data([20], &Device::flex());
        vocabulary_statistics(Tensor::zeros([1, 7], &Device::flex()), targets, (0..7, VOCABULARY), None);
    }
}
