//! Interleaved 1F1B: several stages a rank, which divides the bubble by their number.
//!
//! Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021. There is
//! any number of stages a rank, placed in a loop.
//!
//! Notation: `p` ranks, `v` stages a rank, `m` microbatches, in `max(1, m / p)` rounds of equal size `g`, so that `m`
//! must be a multiple of the number of rounds. The stages of a rank alternate, each for the `g` microbatches of a round
//! (`interleaving.rs`).
//!
//! Rank `r` warms up with `w = min(v m, (v - 1) g + 2 (p - 1 - r))` forwards, then alternates a forward and a backward
//! while forwards remain, and cools down with the remaining backwards. Idle cells, in a grid in which every action
//! takes one cell: `r` before the first forward; after the warm-up, until the first gradient can arrive from the last
//! rank; one before each backward of the cool-down, in which other ranks run a forward.
//!
//! With `m` a multiple of `p` and forward and backward of equal length on every stage, the bubble is
//! `(p - 1) / (v m + p - 1)`. Rank `r` holds at most `w + 1` activations of a stage. On rank 0 that is
//! `(v - 1) p + 2 (p - 1) + 1`, up to `p - 1` more than the `v p` of 1F1B.

use std::iter::repeat_n;

use crate::action::Action;
use crate::generate::error::GenerateError;
use crate::generate::generator::Generator;
use crate::generate::interleaving::Interleaving;
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_cursor::StageCursor;
use crate::ids::Rank;
use crate::placement::Placement;
use crate::schedule::Schedule;

const NAME: &str = "interleaved1f1b";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "1F1B with several stages a rank; smaller bubble, a little more memory",
    settings: &[],
    aliases: &["interleaved", "1f1b-interleaved", "vpp"],
    generate,
};

fn generate(spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    let placement = spec.looped()?;
    let group = spec.microbatches_per_round(NAME)?;
    let rows = placement.all_ranks().map(|rank| row(&placement, rank, spec.microbatches, group)).collect();
    Ok(Schedule::generated(placement, spec.microbatches, rows))
}

fn row(placement: &Placement, rank: Rank, microbatches: u32, group: u32) -> Vec<Option<Action>> {
    let mut cursors = StageCursor::of_rank(placement, rank);
    let order = Interleaving { chunks: cursors.len() as u32, group };
    let forwards = order.chunks * microbatches;
    let followers = placement.ranks() - 1 - rank.get();
    let warm_up = forwards.min((order.chunks - 1) * group + 2 * followers);
    let first_backward = placement.stages() + 2 * followers;
    let mut row = Vec::with_capacity((rank.get() + first_backward + 3 * forwards) as usize);
    row.extend(repeat_n(None, rank.index()));
    row.extend((0..warm_up).map(|op| Some(cursors[order.forward(op)].forward())));
    if warm_up > 0 {
        row.extend(repeat_n(None, first_backward.saturating_sub(warm_up + rank.get()) as usize));
    }
    for op in 0..forwards {
        row.push((warm_up + op < forwards).then(|| cursors[order.forward(warm_up + op)].forward()));
        row.push(Some(cursors[order.backward(op)].backward()));
    }
    row
}
