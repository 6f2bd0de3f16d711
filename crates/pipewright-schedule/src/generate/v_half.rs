//! V-Half: half the memory of 1F1B, and less than half its bubble.
//!
//! Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. There are two stages a rank, placed in a V, and
//! the backward is split. `building_block.rs` makes the schedule from the block.
//!
//! The block, with `p` ranks: from rank to rank, `F0` moves two slots on the way down, `F1` one on the way up, `I1` two
//! on the way down, and `I0` one on the way up. There is one slot at each turning point, and for even `p` three more at
//! the upper one, so that no two actions share a slot. Rank `r` has `F0` in slot `2 r`, `F1` in `3 p - 2 - r`, `I1` in
//! `3 p - 1 + e + 2 r` and `I0` in `6 p - 2 + e - r`, where `e` is 3 for even and 0 for odd `p`. On every rank both
//! activations together live for `6 p - 3 + e` slots. A microbatch starts every six slots, so about `p` activations are
//! alive at once, half of the `2 p` of 1F1B.
//!
//! Every rank holds at most `2 (p / 2 + 1)` activations of a stage (`/` rounding down). With `F`, `I` and `W` of one
//! length and `m >= 2 p`, the bubble is `b / (6 m + b)`, where `b` is `3 p - 7` for even `p >= 4` and `3 p - 4` for odd
//! `p >= 3`. For 1F1B, `b` is `6 (p - 1)`.

use crate::generate::building_block::{BuildingBlock, squeezed};
use crate::generate::error::GenerateError;
use crate::generate::generator::Generator;
use crate::generate::spec::ScheduleSpec;
use crate::schedule::Schedule;

const NAME: &str = "v-half";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "a V at half the memory of 1F1B, less than half its bubble",
    settings: &[],
    aliases: &[],
    generate,
};

pub(super) const BLOCK: BuildingBlock = BuildingBlock { slots, peak };

fn generate(spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    squeezed(NAME, spec, BLOCK)
}

fn slots(ranks: u32, rank: u32) -> [u32; 4] {
    let apart = if ranks.is_multiple_of(2) { 3 } else { 0 };
    [2 * rank, 3 * ranks - 2 - rank, 3 * ranks - 1 + apart + 2 * rank, 6 * ranks - 2 + apart - rank]
}

fn peak(ranks: u32) -> u32 {
    2 * (ranks / 2 + 1)
}
