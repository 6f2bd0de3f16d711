//! Interleaved 1F1B: several stages a rank, so that the bubble shrinks by their number.
//!
//! Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
//! Any number of stages a rank, in a loop.
//!
//! Notation: `p` ranks, `v` stages a rank, `m` microbatches, in `max(1, m / p)` rounds of equal size `g`, so
//! that `m` must be a multiple of the number of rounds. The rank's stages take turns, each for the `g`
//! microbatches of a round (`interleaving.rs`).
//!
//! Rank `r` warms up with `w = min(v m, (v - 1) g + 2 (p - 1 - r))` forwards, then runs a forward and a
//! backward in turn while forwards remain, and cools down with the remaining backwards. Idle cells, in a grid
//! in which every action takes one: `r` before the first forward; after the warm-up, until the first
//! gradient can have come up from the last rank; one before each backward of the cool-down, where the other
//! ranks run a forward.
//!
//! With `m` a multiple of `p` and forward and backward of equal length on every stage, the bubble is
//! `(p - 1) / (v m + p - 1)`. Rank `r` holds at most `w + 1` activations of a stage, on rank 0
//! `(v - 1) p + 2 (p - 1) + 1`: the price of the small bubble is up to `p - 1` more than the `v p` of 1F1B.

use std::iter::repeat_n;

use crate::action::Action;
use crate::generate::catalogue::Generator;
use crate::generate::error::GenerateError;
use crate::generate::interleaving::Interleaving;
use crate::generate::lane::Lane;
use crate::generate::spec::ScheduleSpec;
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
    let mut lanes = Lane::of_rank(placement, rank);
    let order = Interleaving { chunks: lanes.len() as u32, group };
    let forwards = order.chunks * microbatches;
    let followers = placement.ranks() - 1 - rank.get();
    let warm_up = forwards.min((order.chunks - 1) * group + 2 * followers);
    let first_backward = placement.stages() + 2 * followers;
    let mut row = Vec::with_capacity((rank.get() + first_backward + 3 * forwards) as usize);
    row.extend(repeat_n(None, rank.index()));
    row.extend((0..warm_up).map(|op| Some(lanes[order.forward(op)].forward())));
    if warm_up > 0 {
        row.extend(repeat_n(None, first_backward.saturating_sub(warm_up + rank.get()) as usize));
    }
    for op in 0..forwards {
        row.push((warm_up + op < forwards).then(|| lanes[order.forward(warm_up + op)].forward()));
        row.push(Some(lanes[order.backward(op)].backward()));
    }
    row
}
