//! The targets and the loss of a head that predicts further tokens than the next one.
//!
//! The prediction of depth `k` is, at position `t`, of the token `k` positions after the target of `t`, which
//! is the target of `t + k`. The next token has depth 0. A further prediction is of a token of the document of
//! `t`: it does not count if this document ends before.

use burn::tensor::{Bool, Int, Tensor, TensorData};
use pipewright::nn::{self, IGNORED_TARGET};
use pipewright::stage::StageContext;

use crate::documents::{documents_of, given_scope, host, last_of_documents};
use crate::head_form::{FurtherPredictions, prediction_path};
use crate::valid_tokens::given_counts;

/// The name of the loss of further predictions in reports.
const LOSS: &str = "mtp";

/// Returns the targets of each prediction, `[rows, sequence]`, in the order of the depths from 0 to
/// `further.depth`. Targets that a row does not have, or that are behind its valid tokens, do not count, and
/// neither do targets of a further prediction in another document. If no side input names the documents, they
/// are found in the token `ids` ([`FurtherPredictions::needs_ids`]).
///
/// # Panics
/// When a side input with the numbers of valid tokens or with the documents does not fit the targets.
pub(crate) fn targets_of_each(
    targets: &Tensor<2, Int>,
    ids: Option<&Tensor<2, Int>>,
    further: FurtherPredictions,
    context: &StageContext,
) -> Vec<Tensor<2, Int>> {
    let [rows, sequence] = targets.dims();
    let targets = match given_counts(context, rows, sequence) {
        Some(counts) => without(targets.clone(), |row, t| t >= counts[row]),
        None => targets.clone(),
    };
    if further.depth == 0 {
        return vec![targets];
    }
    let documents = match (given_scope(context, [rows, sequence]), ids) {
        (Some(scope), _) => scope.documents.to_vec(),
        (None, Some(ids)) => documents_of(&host(ids), sequence, further.bos_token_id),
        (None, None) => vec![0; rows * sequence],
    };
    let last = last_of_documents(&documents, sequence);
    let further_targets = (1..=further.depth).map(|depth| {
        let ahead = shifted(&targets, depth);
        let ahead = without(ahead, |row, t| t + depth > last[row * sequence + t]);
        // The last token of a document may have the beginning of the next one as its target.
        match further.bos_token_id {
            Some(bos) => ahead.clone().mask_fill(ahead.equal_elem(bos as i64), IGNORED_TARGET),
            None => ahead,
        }
    });
    std::iter::once(targets.clone()).chain(further_targets).collect()
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

/// Returns the cross entropy between `softmax(logits)` and the target ids in nats, as the mean over all
/// tokens.
///
/// Shapes: logits `[batch, sequence, vocabulary]`, targets `[batch, sequence]`, result `[1]`.
///
/// # Panics
/// When a target is outside the vocabulary.
pub fn cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    let [batch, sequence, vocabulary] = logits.dims();
    let tokens = batch * sequence;
    nn::cross_entropy(logits.reshape([tokens, vocabulary]), targets.reshape([tokens]))
}

/// Returns the targets so many positions ahead. The last ones of a row do not count.
fn shifted(targets: &Tensor<2, Int>, ahead: usize) -> Tensor<2, Int> {
    let [rows, sequence] = targets.dims();
    let nothing = |length| Tensor::full([rows, length], IGNORED_TARGET, &targets.device());
    match sequence.checked_sub(ahead).filter(|&left| left > 0) {
        None => nothing(sequence),
        Some(left) => Tensor::cat(vec![targets.clone().narrow(1, ahead, left), nothing(ahead)], 1),
    }
}

/// Returns the targets. Targets of the rows and positions that `is_left_out` chooses are replaced and do not
/// count.
fn without(targets: Tensor<2, Int>, is_left_out: impl Fn(usize, usize) -> bool) -> Tensor<2, Int> {
    let [rows, sequence] = targets.dims();
    let mask: Vec<bool> =
        (0..rows * sequence).map(|token| is_left_out(token / sequence, token % sequence)).collect();
    if !mask.contains(&true) {
        return targets;
    }
    let mask = Tensor::<2, Bool>::from_data(TensorData::new(mask, [rows, sequence]), &targets.device());
    targets.mask_fill(mask, IGNORED_TARGET)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use pipewright_schedule::{Microbatch, StageIndex};

    const NOTHING: i64 = IGNORED_TARGET;

    fn numbers(targets: &Tensor<2, Int>) -> Vec<i64> {
        targets.clone().into_data().iter().collect()
    }

    #[test]
    fn targets_are_ahead_and_stop_with_the_valid_tokens() {
        let targets = Tensor::<2, Int>::from_data([[1, 2, 3], [4, 5, 6]], &Device::flex());
        let found = |targets: &Tensor<2, Int>, ahead| numbers(&shifted(targets, ahead));
        assert_eq!(found(&targets, 1), [2, 3, NOTHING, 5, 6, NOTHING]);
        assert_eq!(found(&targets, 3), [NOTHING; 6]);
        assert_eq!(found(&targets, 7), [NOTHING; 6]);
        let valid = without(targets, |row, t| t >= [3, 2][row]);
        assert_eq!(numbers(&valid), [1, 2, 3, 4, 5, NOTHING]);
        assert_eq!(found(&valid, 1), [2, 3, NOTHING, 5, NOTHING, NOTHING]);
    }

    #[test]
    fn further_targets_are_of_the_same_document() {
        let tensor = |ids: [i64; 6]| Tensor::<2, Int>::from_data([ids], &Device::flex());
        let further = FurtherPredictions { depth: 2, loss_weight: 1.0, bos_token_id: Some(1) };
        let (ids, targets) = (tensor([1, 5, 6, 1, 7, 8]), tensor([5, 6, 1, 7, 8, 9]));
        let found = targets_of_each(
            &targets,
            Some(&ids),
            further,
            &StageContext::new(StageIndex::new(0), Microbatch::new(0)),
        );
        assert_eq!(numbers(&found[0]), [5, 6, 1, 7, 8, 9]);
        assert_eq!(numbers(&found[1]), [6, NOTHING, NOTHING, 8, 9, NOTHING]);
        assert_eq!(numbers(&found[2]), [NOTHING, NOTHING, NOTHING, 9, NOTHING, NOTHING]);
        // A beginning that does not count as a target separates documents too.
        let targets = tensor([NOTHING, NOTHING, NOTHING, 7, 8, 9]);
        let found = targets_of_each(
            &targets,
            Some(&ids),
            further,
            &StageContext::new(StageIndex::new(0), Microbatch::new(0)),
        );
        assert_eq!(numbers(&found[1]), [NOTHING, NOTHING, NOTHING, 8, 9, NOTHING]);
    }
}
