//! The loss of a reward model, and the accuracy of a classifier.
//!
//! A reward model scores sequences: the reward of a sequence is the output of a head with one label at its last token.
//!
//! With the rewards `r(c)` of the chosen sequence and `r(l)` of the rejected one, the loss is `-ln s(r(c) - r(l) - m)` (Bradley
//! and Terry, 1952), where `m` is the margin of the pair or 0 (Touvron et al., 2023, arXiv:2307.09288), plus `c (r(c) + r(l))^2`,
//! which keeps rewards around 0 (Eisenstein et al., 2023, arXiv:2312.09244). TRL computes the same.

use burn::tensor::{Int, Tensor, TensorData};
use pipewright::nn::{TensorParallel, log_sigmoid, predicted_targets};
use pipewright::stage::StageContext;
use pipewright::train::LABEL_ACCURACY;

use crate::preference::{PreferenceLoss, mean, report, sequences_of};

/// Returns the loss of a microbatch from the scores `[rows * row_len, 1]` of its tokens, and reports rewards.
///
/// # Panics
/// When the side inputs of preference training are missing or do not fit.
pub(crate) fn loss(
    preference: &PreferenceLoss,
    scores: Tensor<2>,
    row_len: usize,
    context: &StageContext,
) -> Tensor<1> {
    let sequences = sequences_of(context, row_len);
    let pairs = sequences.len() / 2;
    assert!(pairs > 0 && sequences.len() == 2 * pairs, "a record of preference training has two sequences");
    let device = if scores.is_autodiff() { scores.device().inner() } else { scores.device() };
    let last: Vec<i64> = sequences
        .iter()
        .map(|sequence| *sequence.places.last().expect("a sequence has a token") as i64)
        .collect();
    let last = Tensor::<1, Int>::from_data(TensorData::new(last, [2 * pairs]), &device);
    let rewards = scores.select(0, last).reshape([pairs, 2]);
    let margins: Vec<f32> =
        sequences.iter().step_by(2).map(|sequence| f32::from_bits(sequence.number as u32)).collect();
    let margins = Tensor::<2>::from_data(TensorData::new(margins, [pairs, 1]), &device).cast(rewards.dtype());
    let [chosen, rejected] = [0, 1].map(|column| rewards.clone().narrow(1, column, 1));
    let difference = chosen.clone() - rejected.clone();
    let is_right = difference.clone().greater_elem(0.0).float().cast(rewards.dtype());
    for (name, value) in [
        ("accuracy", mean(is_right)),
        ("margin", mean(difference.clone())),
        ("min_reward", rewards.clone().detach().min()),
        ("mean_reward", mean(rewards.clone().reshape([2 * pairs, 1]))),
        ("max_reward", rewards.detach().max()),
    ] {
        report(context, name, value);
    }
    let loss = mean(log_sigmoid(difference - margins).neg());
    if preference.center == 0.0 {
        return loss;
    }
    loss + mean((chosen + rejected).powi_scalar(2)) * preference.center
}

/// Reports the share of the targets that count whose label the model predicts.
pub(crate) fn report_accuracy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    labels: usize,
    context: &StageContext,
) {
    let device = if logits.is_autodiff() { logits.device().inner() } else { logits.device() };
    let [hits, all] = predicted_targets(logits, targets, labels, &TensorParallel::default());
    let share = hits as f32 / all.max(1) as f32;
    context.auxiliary_loss(LABEL_ACCURACY, 0.0, Tensor::from_data([share], &device));
}
