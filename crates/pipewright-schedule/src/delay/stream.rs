//! Batches as one stream of microbatches.
//!
//! A building block has the times at which each rank computes for one microbatch. Repeated without a bubble, it is the steady
//! state of a schedule (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024), and a schedule of one batch differs
//! from it where the pipeline fills and drains. If batches overlap, it never drains, so the row of a rank is the repeated block
//! itself. Each rank then computes the microbatches of a batch in the order of the block, not in the order of the schedule.
//!
//! Rules: (1) a computation starts as soon as its inputs have arrived and its rank is free. The rank is not free while it computes
//! the same block for an earlier or a later microbatch; (2) gradients of weights are placed last, in the time that is left; (3) a
//! message counts as slower than it is ([`SLACKS`]). A rank then keeps activations longer, but does not wait if a message is a
//! little late; (4) the last microbatch of a batch ends before the first microbatch of the batch after the next one begins, because
//! that batch needs the update.

use super::delayed_action::DelayedAction;
use super::taken::Taken;
use super::weaver::{Weaver, merged};
use crate::action::{Action, ActionKind};
use crate::ids::Microbatch;

/// How much longer messages take, in quarters of a mean computation: to higher ranks, and to lower ones. With two stages per rank
/// in a V, `[4, 0]` makes the block of V-Half, and `[0, 0]` the one of V-Min.
pub(super) const SLACKS: [[u64; 2]; 10] =
    [[8, 8], [6, 6], [5, 5], [4, 4], [3, 3], [2, 2], [4, 0], [2, 0], [1, 1], [0, 0]];

/// Returns the repeating rows for a period of a batch; `None` if the block does not fit. `alone` has run one batch, whose
/// microbatches are uniform ([`is_uniform`]).
pub(super) fn streamed(alone: &Weaver<'_>, period: u64, slack: [u64; 2]) -> Option<Vec<Vec<DelayedAction>>> {
    let count = alone.microbatches as u64;
    let period = period.div_ceil(count);
    let blocks = block(alone, period, slack.map(|part| part * alone.mean_duration() / 4))?;
    let ends = blocks.iter().flatten().map(|(start, action)| start + alone.duration(*action));
    if ends.max()? > (count + 1) * period {
        return None;
    }
    let repeat = |block: &Vec<(u64, Action)>| {
        let of = |(start, action): (u64, Action), index: u64| {
            let microbatch = Microbatch::new(index as u32);
            let action = Action::of_microbatch(action.kind(), action.stage(), microbatch)?;
            Some((start + index * period, action))
        };
        let repeated = (0..count).flat_map(|index| block.iter().filter_map(move |cell| of(*cell, index)));
        let mut row: Vec<(u64, Action)> = repeated.collect();
        row.sort_by_key(|cell| cell.0);
        row
    };
    Some(merged(&blocks.iter().map(repeat).collect::<Vec<_>>(), count * period))
}

/// Returns whether all microbatches have the same computations on each rank.
pub(super) fn is_uniform(alone: &Weaver<'_>) -> bool {
    alone.rows.iter().all(|row| {
        let mut own = vec![Vec::new(); alone.microbatches];
        for action in row {
            if let Some(microbatch) = action.microbatch() {
                own[microbatch.get() as usize].push((action.stage(), action.kind()));
            }
        }
        own.iter_mut().for_each(|computations| computations.sort_unstable());
        own.windows(2).all(|pair| pair[0] == pair[1])
    })
}

/// Returns the starts of the first microbatch's computations on each rank.
fn block(alone: &Weaver<'_>, period: u64, slack: [u64; 2]) -> Option<Vec<Vec<(u64, Action)>>> {
    let mut taken = vec![Taken::of(period); alone.rows.len()];
    let mut block = vec![Vec::new(); alone.rows.len()];
    let grid = alone.grid();
    let mut arrivals = vec![[(0_u64, 0_u64); 2]; alone.arrivals.len()];
    // The ends of the last computation of each stage.
    let mut ends = vec![0; alone.placement.stages() as usize];
    let (weights, others): (Vec<_>, Vec<_>) = alone
        .in_sequence()
        .filter(|(_, action)| action.microbatch() == Some(Microbatch::new(0)))
        .partition(|(_, action)| action.kind() == ActionKind::WeightBackward);
    for (rank, action) in others.into_iter().chain(weights) {
        let (needed, wished) =
            alone.needed(action, 0).map_or((0, 0), |(tensor, slot)| arrivals[tensor][slot]);
        let last = &mut ends[action.stage().index()];
        let since = needed.max(wished.next_multiple_of(grid)).max(*last);
        let start = taken[rank].take(since, alone.duration(action))?;
        let wished = wished.max(*last);
        *last = start + alone.duration(action);
        block[rank].push((start, action));
        if let Some((reader, slot, hop)) = alone.delivery(action) {
            let reader = reader.map_or(rank, |reader| alone.placement.rank_of(reader).index());
            let more = if reader == rank { 0 } else { slack[usize::from(reader < rank)] };
            arrivals[alone.tensor(action.stage(), action, 0)][slot] =
                (*last + hop, wished + alone.duration(action) + hop + more);
        }
    }
    Some(block)
}
