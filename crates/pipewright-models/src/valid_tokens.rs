//! The valid tokens of a microbatch: the tokens after a row's valid ones only fill it, and do not count in
//! the losses and loads of routers.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use pipewright::nn::TokenScope;
use pipewright::stage::StageContext;
use pipewright::train::data::VALID_TOKENS;

use crate::documents::side;

/// Returns the number of valid tokens of each row, if a side input says it.
///
/// # Panics
/// When a number is 0, or larger than `sequence`, the number of a row's tokens.
pub(crate) fn given_counts(context: &StageContext, rows: usize, sequence: usize) -> Option<Vec<usize>> {
    let counts = side::<Tensor<1, Int>>(context, VALID_TOKENS)?;
    let counts: Vec<i64> = counts.into_data().iter::<i64>().collect();
    assert_eq!(counts.len(), rows, "`{VALID_TOKENS}` has a number for each row");
    let fits = counts.iter().all(|count| (1..=sequence as i64).contains(count));
    assert!(fits, "`{VALID_TOKENS}`: {counts:?} are not all from 1 to {sequence}");
    Some(counts.into_iter().map(|count| count as usize).collect())
}

/// Returns the length of the sequences that the positions of a microbatch's valid tokens reach: the largest
/// position and 1. Rows without a scope have the positions from 0 on. Positions that depend on the length
/// of the sequence depend on this number, as in transformers.
///
/// # Panics
/// As [`given_counts`].
pub(crate) fn reach(
    context: &StageContext,
    scope: Option<&TokenScope>,
    [rows, sequence]: [usize; 2],
) -> usize {
    let counts = given_counts(context, rows, sequence).unwrap_or_else(|| vec![sequence; rows]);
    let of_row = |(row, &count): (usize, &usize)| match scope {
        None => count,
        Some(scope) => {
            let positions = &scope.positions[row * sequence..][..count];
            positions.iter().max().map_or(count, |&position| position as usize + 1)
        }
    };
    counts.iter().enumerate().map(of_row).max().unwrap_or(sequence)
}

/// Returns whether each of the tokens of `rows` rows is valid; `None` if all of them are.
///
/// # Panics
/// As [`given_counts`].
pub(crate) fn valid_tokens(context: &StageContext, [rows, sequence]: [usize; 2]) -> Option<Arc<[bool]>> {
    let counts = given_counts(context, rows, sequence)?;
    let valid: Arc<[bool]> =
        (0..rows * sequence).map(|token| token % sequence < counts[token / sequence]).collect();
    valid.contains(&false).then_some(valid)
}

/// Returns `1 / valid tokens` for a valid token and 0 for another: the weights of a mean over valid tokens.
pub(crate) fn mean_weights(valid: &[bool]) -> Arc<[f32]> {
    let share = 1.0 / count(valid) as f32;
    valid.iter().map(|&valid| if valid { share } else { 0.0 }).collect()
}

/// Returns how often valid tokens chose each of `experts` experts. `chosen` has the choices of all tokens,
/// the same number for each.
pub(crate) fn valid_choices(chosen: &[usize], experts: usize, valid: &[bool]) -> Vec<u64> {
    let choices = (chosen.len() / valid.len().max(1)).max(1);
    let mut counts = vec![0; experts];
    for (chosen, &valid) in chosen.chunks(choices).zip(valid) {
        chosen.iter().for_each(|&expert| counts[expert] += u64::from(valid));
    }
    counts
}

/// Returns the number of experts times the share of the valid tokens that chose each.
pub(crate) fn valid_loads(choices: &[u64], valid: &[bool]) -> Arc<[f32]> {
    let (experts, tokens) = (choices.len() as u64, count(valid));
    choices.iter().map(|&count| (experts * count) as f32 / tokens as f32).collect()
}

/// Returns the number of valid tokens, at least 1.
fn count(valid: &[bool]) -> usize {
    valid.iter().filter(|valid| **valid).count().max(1)
}
