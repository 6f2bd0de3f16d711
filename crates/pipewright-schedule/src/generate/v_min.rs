//! V-Min: a third of the memory of 1F1B, and about two thirds of its bubble.
//!
//! Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. There are two stages a rank, placed in a V, and
//! the backward is split. `building_block.rs` makes the schedule from the block.
//!
//! The block, with `p` ranks: all four passes move one slot from rank to rank, the least that dependencies allow. There
//! is one slot at each turning point, and if `p` is a multiple of 3 two more at the upper one, so that no two actions
//! share a slot. Rank `r` has `F0` in slot `r`, `F1` in `2 p - 1 - r`, `I1` in `2 p + e + r` and `I0` in
//! `4 p - 1 + e - r`, where `e` is 0 or 2. On every rank both activations together live for `4 p + 2 e` slots. A
//! microbatch starts every six slots, so about `2 p / 3` activations are alive at once, a third of the `2 p` of 1F1B.
//!
//! Every rank holds at most `2 ((p + 1) / 3 + 1)` activations of a stage (`/` rounding down). With `F`, `I` and `W` of
//! one length and `m >= 2 p`, the bubble is `b / (6 m + b)`, where `b` is `4 p - 7`, `4 p - 5` and `4 p - 9` for
//! `p >= 3` with remainder 0, 1 and 2 modulo 3. For 1F1B, `b` is `6 (p - 1)`. A block has no slack around the V: if
//! `F`, `I` and `W` differ in length, ranks idle in the steady state.

use crate::generate::building_block::{BuildingBlock, squeezed};
use crate::generate::error::GenerateError;
use crate::generate::generator::Generator;
use crate::generate::spec::ScheduleSpec;
use crate::schedule::Schedule;

const NAME: &str = "v-min";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "a V at a third of the memory of 1F1B, two thirds of its bubble",
    settings: &[],
    aliases: &[],
    generate,
};

pub(super) const BLOCK: BuildingBlock = BuildingBlock { slots, peak };

fn generate(spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    squeezed(NAME, spec, BLOCK)
}

fn slots(ranks: u32, rank: u32) -> [u32; 4] {
    let apart = if ranks.is_multiple_of(3) { 2 } else { 0 };
    [rank, 2 * ranks - 1 - rank, 2 * ranks + apart + rank, 4 * ranks - 1 + apart - rank]
}

fn peak(ranks: u32) -> u32 {
    2 * ((ranks + 1) / 3 + 1)
}
