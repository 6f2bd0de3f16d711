//! V-Min: a third of the memory of 1F1B, and about two thirds of its bubble.
//!
//! The guide in `GENERATOR` has the paper and the formulas. There are two stages per rank, placed in a V, and
//! the backward is split. `building_block.rs` makes the schedule from the block.
//!
//! The block, with `p` ranks: all four passes move one slot from rank to rank, the least that dependencies
//! allow. There is one slot at each turning point, and if `p` is a multiple of 3 two more at the upper one,
//! so that no two actions share a slot. Rank `r` has `F0` in slot `r`, `F1` in `2 p - 1 - r`, `I1` in
//! `2 p + e + r` and `I0` in `4 p - 1 + e - r`, where `e` is 0 or 2. On every rank both activations together
//! live for `4 p + 2 e` slots. A microbatch starts every six slots, so about `2 p / 3` activations are alive
//! at once, a third of the `2 p` of 1F1B.
//!
//! In units of an action, the ranks idle about `4 p`; with 1F1B they idle `6 (p - 1)`. A block has no slack
//! around the V: if `F`, `I` and `W` differ in length, ranks idle in the steady state.

use crate::generate::building_block::{BuildingBlock, squeezed};
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::spec::ScheduleSpec;
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "v-min",
    summary: "a V at a third of the memory of 1F1B, two thirds of its bubble",
    guide: Guide {
        source: "Qi et al., \"Pipeline Parallelism with Controllable Memory\", 2024",
        order: "There are two stages on each rank, placed in a V. The actions of a microbatch form a block \
                of six slots on each rank, as in V-Half, with the shortest lives of activations that \
                dependencies allow.",
        choice: "Choose it if V-Half does not fit either: it needs about a third of the activations of \
                 1F1B. A block has no slack, so ranks idle in the steady state if `F`, `I` and `W` differ \
                 in length or messages are slow.",
        bubble: &[
            Formula::with("p is a multiple of 3 and m >= 2 p", "(4 p - 7) / (6 m + 4 p - 7)"),
            Formula::with("p - 1 is a multiple of 3 and p >= 4 and m >= 2 p", "(4 p - 5) / (6 m + 4 p - 5)"),
            Formula::with("p - 2 is a multiple of 3 and p >= 5 and m >= 2 p", "(4 p - 9) / (6 m + 4 p - 9)"),
        ],
        peak: &[
            Formula::with("p is a multiple of 3 and m >= 2 p", "(2 p + 6) / 3"),
            Formula::with("p - 1 is a multiple of 3 and p >= 4 and m >= 2 p", "(2 p + 4) / 3"),
            Formula::with("p - 2 is a multiple of 3 and m >= 2 p", "(2 p + 8) / 3"),
        ],
    },
    stages: StageRule::V,
    actions: 3,
    generate,
    ..Generator::USUAL
};

pub(super) const BLOCK: BuildingBlock = BuildingBlock { slots, peak };

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    squeezed(placement, spec.microbatches, BLOCK)
}

fn slots(ranks: u32, rank: u32) -> [u32; 4] {
    let apart = if ranks.is_multiple_of(3) { 2 } else { 0 };
    [rank, 2 * ranks - 1 - rank, 2 * ranks + apart + rank, 4 * ranks - 1 + apart - rank]
}

fn peak(ranks: u32) -> u32 {
    2 * ((ranks + 1) / 3 + 1)
}
