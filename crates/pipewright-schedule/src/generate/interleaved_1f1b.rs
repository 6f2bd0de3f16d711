//! Interleaved 1F1B: several stages a rank, which divides the bubble by their number.
//!
//! The guide in `GENERATOR` has the paper and the formulas.
//!
//! Notation: `p` ranks, `v` stages a rank, `m` microbatches, in `max(1, m / p)` rounds of equal size `g`, so that `m`
//! must be a multiple of the number of rounds. The stages of a rank alternate, each for the `g` microbatches of a round
//! (`interleaving.rs`).
//!
//! Rank `r` warms up with `w = min(v m, (v - 1) g + 2 (p - 1 - r))` forwards, then alternates a forward and a backward
//! while forwards remain, and cools down with the remaining backwards. It holds at most `w + 1` activations of a stage.
//!
//! Each action has one cell. The idle cells are: `r` before the first forward; after the warm-up, until the first gradient
//! can arrive from the last rank; one before each backward of the cool-down, in which other ranks run a forward.

use std::iter::repeat_n;

use crate::action::Action;
use crate::generate::error::GenerateError;
use crate::generate::generator::Generator;
use crate::generate::guide::{Formula, Guide};
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
    trains: true,
    aliases: &["interleaved", "1f1b-interleaved", "vpp"],
    guide: Guide {
        source: "Narayanan et al., \"Efficient Large-Scale Language Model Training on GPU Clusters Using \
                 Megatron-LM\", 2021",
        order: "There is any number of stages on each rank, placed in a loop. Microbatches run in rounds of \
                equal size. The number of rounds is `m / p`, rounded down, and at least 1. The stages of a rank alternate, each \
                for the microbatches of a round. A rank warms up with forwards, then alternates a forward \
                and a backward, and ends with the remaining backwards.",
        choice: "Choose it if the layers cannot defer their weight gradients and the model has at least `v` \
                 layers for each rank. It divides the bubble of 1F1B by `v`, sends `v` times as many \
                 messages, and needs a little more memory. `m` is a multiple of the number of rounds; every \
                 multiple of `p` is.",
        bubble: &[Formula::with("m is a multiple of p", "(p - 1) / (v m + p - 1)")],
        peak: &[Formula::with("m is a multiple of p", "min(v m, v p + p - 1)")],
    },
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
