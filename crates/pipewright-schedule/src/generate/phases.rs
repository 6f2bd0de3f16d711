//! Rows of three phases: a warm-up of forwards, then forwards and backwards alternately, then the remaining
//! backwards.
//!
//! Each kind visits the chunks in the order of `interleaving.rs`, and weight gradients follow the order of
//! the input gradients. A schedule chooses two numbers for each rank: the forwards of the warm-up, and, if its
//! backwards are split, the largest number of pending weight gradients.

use crate::action::Action;
use crate::generate::interleaving::Interleaving;
use crate::generate::stage_cursor::StageCursor;
use crate::ids::StageIndex;

/// The settings of a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Phases {
    /// The number of forwards before the first forward that is followed by a backward.
    pub(super) warm_up: u32,
    /// The largest number of pending weight gradients, if backwards are split. Once it is reached, a weight
    /// backward follows each input backward.
    pub(super) pending: Option<u32>,
}

/// Makes the row of a rank with one stage.
pub(super) fn one_stage(stage: StageIndex, microbatches: u32, phases: Phases) -> Vec<Option<Action>> {
    let order = Interleaving { chunks: 1, group: microbatches, microbatches };
    steady(&mut [StageCursor::new(stage)], order, phases)
}

/// Makes the row of a rank with the stages of `cursors`.
pub(super) fn steady(
    cursors: &mut [StageCursor],
    order: Interleaving,
    Phases { warm_up, pending }: Phases,
) -> Vec<Option<Action>> {
    let all = order.all();
    let warm_up = warm_up.min(all);
    let actions_of_each = if pending.is_some() { 3 } else { 2 };
    let mut row = Vec::with_capacity(actions_of_each * all as usize);
    row.extend((0..warm_up).map(|op| Some(cursors[order.forward(op)].forward())));
    for op in 0..all {
        if warm_up + op < all {
            row.push(Some(cursors[order.forward(warm_up + op)].forward()));
        }
        let Some(pending) = pending else {
            row.push(Some(cursors[order.backward(op)].backward()));
            continue;
        };
        row.push(Some(cursors[order.backward(op)].input_backward()));
        if let Some(oldest) = op.checked_sub(pending) {
            row.push(Some(cursors[order.backward(oldest)].weight_backward()));
        }
    }
    let left = pending.map_or(all, |pending| all.saturating_sub(pending))..all;
    row.extend(left.map(|op| Some(cursors[order.backward(op)].weight_backward())));
    row
}
