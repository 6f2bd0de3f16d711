//! Warm-up, then forward, input gradients and weight gradients in turn, then the weight gradients that are
//! left: one row of every schedule of the ZB-H family.
//!
//! Each kind visits the chunks in the order of `interleaving.rs`; weight gradients follow the order of the
//! input gradients. The two numbers that a schedule chooses for each rank: how many forwards come before the
//! first one that is followed by a backward, and how many weight gradients wait at most.

use crate::action::Action;
use crate::generate::interleaving::Interleaving;
use crate::generate::stage_cursor::StageCursor;
use crate::ids::StageIndex;

/// What a schedule of the family chooses for a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Phases {
    /// Forwards before the first forward that a backward follows.
    pub(super) warm_up: u32,
    /// How many weight gradients wait at most: from then on, each backward for the inputs is followed by one
    /// for the weights.
    pub(super) pending: u32,
}

/// The row of a rank with one stage.
pub(super) fn one_stage(stage: StageIndex, microbatches: u32, phases: Phases) -> Vec<Option<Action>> {
    let order = Interleaving { chunks: 1, group: microbatches };
    split_backward(&mut [StageCursor::new(stage)], order, microbatches, phases)
}

/// The row of a rank with the stages of `cursors`.
pub(super) fn split_backward(
    cursors: &mut [StageCursor],
    order: Interleaving,
    microbatches: u32,
    phases: Phases,
) -> Vec<Option<Action>> {
    let all = order.chunks * microbatches;
    let warm_up = phases.warm_up.min(all);
    let mut row = Vec::with_capacity(3 * all as usize);
    row.extend((0..warm_up).map(|op| Some(cursors[order.forward(op)].forward())));
    for op in 0..all {
        if warm_up + op < all {
            row.push(Some(cursors[order.forward(warm_up + op)].forward()));
        }
        row.push(Some(cursors[order.backward(op)].input_backward()));
        if let Some(oldest) = op.checked_sub(phases.pending) {
            row.push(Some(cursors[order.backward(oldest)].weight_backward()));
        }
    }
    let left = all.saturating_sub(phases.pending)..all;
    row.extend(left.map(|op| Some(cursors[order.backward(op)].weight_backward())));
    row
}
