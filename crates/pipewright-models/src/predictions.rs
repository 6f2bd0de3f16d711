//! The targets and the loss of a head that predicts further tokens than the next one.
//!
//! The prediction of depth `k` is, at position `t`, of the token `k` positions after the target of `t`, which
//! is the target of `t + k`. The next token has depth 0.

use burn::tensor::{Bool, Int, Tensor, TensorData};
use pipewright::nn::IGNORED_TARGET;
use pipewright::stage::StageContext;

use crate::head_form::{FurtherPredictions, prediction_path};
use crate::valid_tokens::given_counts;

/// The name of the loss of further predictions in reports.
const LOSS: &str = "mtp";

/// Returns the targets of each prediction, `[rows, sequence]`, in the order of the depths from 0 to
/// `further.depth`. Targets that a row does not have, or that are behind its valid tokens, do not count.
///
/// # Panics
/// When the side input with the numbers of valid tokens does not fit the targets.
pub(crate) fn targets_of_each(
    targets: &Tensor<2, Int>,
    further: FurtherPredictions,
    context: &StageContext,
) -> Vec<Tensor<2, Int>> {
    let [rows, sequence] = targets.dims();
    let targets = match given_counts(context, rows, sequence) {
        Some(counts) => without_padding(targets.clone(), &counts),
        None => targets.clone(),
    };
    (0..=further.depth).map(|depth| shifted(&targets, depth)).collect()
}

/// Returns the loss of the next token, and adds the losses of further predictions to the step. `loss_of`
/// computes the mean loss of the prediction of a depth.
pub(crate) fn loss_of_all(
    further: FurtherPredictions,
    context: &StageContext,
    mut loss_of: impl FnMut(usize) -> Tensor<1>,
) -> Tensor<1> {
    let next = loss_of(0);
    for depth in 1..=further.depth {
        let share = loss_of(depth) / further.depth as f64;
        context.auxiliary_loss_of(&prediction_path(depth), LOSS, further.loss_weight, share);
    }
    next
}

/// Returns the targets so many positions ahead. The last ones of a row do not count.
fn shifted(targets: &Tensor<2, Int>, ahead: usize) -> Tensor<2, Int> {
    let [rows, sequence] = targets.dims();
    if ahead == 0 {
        return targets.clone();
    }
    let nothing = |length| Tensor::full([rows, length], IGNORED_TARGET, &targets.device());
    match sequence.checked_sub(ahead).filter(|&left| left > 0) {
        None => nothing(sequence),
        Some(left) => Tensor::cat(vec![targets.clone().narrow(1, ahead, left), nothing(ahead)], 1),
    }
}

/// Returns the targets. The targets behind the valid tokens of a row are replaced and do not count.
fn without_padding(targets: Tensor<2, Int>, counts: &[usize]) -> Tensor<2, Int> {
    let [rows, sequence] = targets.dims();
    if counts.iter().all(|&count| count == sequence) {
        return targets;
    }
    let is_padding = counts.iter().flat_map(|&count| (0..sequence).map(move |t| t >= count));
    let is_padding = TensorData::new(is_padding.collect::<Vec<_>>(), [rows, sequence]);
    let is_padding = Tensor::<2, Bool>::from_data(is_padding, &targets.device());
    targets.mask_fill(is_padding, IGNORED_TARGET)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn targets_are_ahead_and_stop_with_the_valid_tokens() {
        const NOTHING: i64 = IGNORED_TARGET;
        let targets = Tensor::<2, Int>::from_data([[1, 2, 3], [4, 5, 6]], &Device::flex());
        let found = |targets: &Tensor<2, Int>, ahead| {
            shifted(targets, ahead).into_data().iter::<i64>().collect::<Vec<_>>()
        };
        assert_eq!(found(&targets, 0), [1, 2, 3, 4, 5, 6]);
        assert_eq!(found(&targets, 1), [2, 3, NOTHING, 5, 6, NOTHING]);
        assert_eq!(found(&targets, 3), [NOTHING; 6]);
        assert_eq!(found(&targets, 7), [NOTHING; 6]);
        let valid = without_padding(targets, &[3, 2]);
        assert_eq!(found(&valid, 0), [1, 2, 3, 4, 5, NOTHING]);
        assert_eq!(found(&valid, 1), [2, 3, NOTHING, 5, NOTHING, NOTHING]);
    }
}
