//! V-Min: a third of the memory of 1F1B, at about two thirds of its bubble.
//!
//! Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. Two stages a rank on a V, the backward
//! split. How the block becomes a schedule is in `building_block.rs`.
//!
//! The block, with `p` ranks: all four passes go one slot a rank, the least that dependencies allow. With one
//! slot for each turn and, for `p` a multiple of 3, two more at the upper turn so that no two meet, rank `r` has
//! `F0` in slot `r`, `F1` in `2 p - 1 - r`, `I1` in `2 p + e + r` and `I0` in `4 p - 1 + e - r`, where `e` is 2 or
//! 0. On every rank both activations together live for `4 p + 2 e` slots up to their `I`: in every period of six,
//! about `2 p / 3` overlap, a third of the `2 p` of 1F1B.
//!
//! Every rank holds at most `2 ((p + 1) / 3 + 1)` activations of a stage (`/` rounding down). With `F`, `I` and
//! `W` of one length and `m >= 2 p`, the bubble is `b / (6 m + b)`, `b` being `4 p - 7`, `4 p - 5` and `4 p - 9`
//! for `p >= 3` that leave 0, 1 and 2 when divided by 3, against `6 (p - 1)` for 1F1B. The sum of a block's
//! times around the V leaves no slack: where `F`, `I` and `W` differ in length, the steady state idles.

use crate::generate::building_block::{BuildingBlock, squeezed};
use crate::generate::catalogue::Generator;
use crate::generate::error::GenerateError;
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
