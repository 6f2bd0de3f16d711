//! V-Half: half the memory of 1F1B, and less than half its bubble.
//!
//! The guide in `GENERATOR` has the paper and the formulas. There are two stages per rank, placed in a V, and
//! the backward is split. `building_block.rs` makes the schedule from the block.
//!
//! The block, with `p` ranks: from rank to rank, `F0` moves two slots on the way down, `F1` one on the way
//! up, `I1` two on the way down, and `I0` one on the way up. There is one slot at each turning point, and for
//! even `p` three more at the upper one, so that no two actions share a slot. Rank `r` has `F0` in slot
//! `2 r`, `F1` in `3 p - 2 - r`, `I1` in `3 p - 1 + e + 2 r` and `I0` in `6 p - 2 + e - r`, where `e` is 3
//! for even and 0 for odd `p`. On every rank both activations together live for `6 p - 3 + e` slots. A
//! microbatch starts every six slots, so about `p` activations are alive at once, half of the `2 p` of 1F1B.
//!
//! In units of an action, the ranks idle `3 p - 7` for even `p >= 4` and `3 p - 4` for odd `p >= 3`; with
//! 1F1B they idle `6 (p - 1)`.

use crate::generate::building_block::{BuildingBlock, squeezed};
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::spec::ScheduleSpec;
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "v-half",
    summary: "a V at half the memory of 1F1B, less than half its bubble",
    guide: Guide {
        source: "Qi et al., \"Pipeline Parallelism with Controllable Memory\", 2024",
        order: "There are two stages on each rank, placed in a V. The actions of a microbatch form a block \
                of six slots on each rank, which is repeated for every microbatch and then moved together.",
        choice: "Choose it if 1F1B does not fit into the memory and the layers defer their weight \
                 gradients: it needs about half of the activations. Slow messages and actions of different \
                 lengths cost it more than schedules with more memory.",
        bubble: &[
            Formula::with("p is even and p >= 4 and m >= 2 p", "(3 p - 7) / (6 m + 3 p - 7)"),
            Formula::with("p is odd and p >= 3 and m >= 2 p", "(3 p - 4) / (6 m + 3 p - 4)"),
        ],
        peak: &[
            Formula::with("p is even and m >= 2 p", "p + 2"),
            Formula::with("p is odd and p >= 3 and m >= 2 p", "p + 1"),
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
    let apart = if ranks.is_multiple_of(2) { 3 } else { 0 };
    [2 * rank, 3 * ranks - 2 - rank, 3 * ranks - 1 + apart + 2 * rank, 6 * ranks - 2 + apart - rank]
}

fn peak(ranks: u32) -> u32 {
    2 * (ranks / 2 + 1)
}
