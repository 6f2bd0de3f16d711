//! V-Half: half the memory of 1F1B, at less than half its bubble.
//!
//! Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. Two stages a rank on a V, the backward
//! split. How the block becomes a schedule is in `building_block.rs`.
//!
//! The block, with `p` ranks: `F0` goes down two slots a rank, `F1` up one, `I1` down two, `I0` up one. With
//! one slot for each turn and, for even `p`, three more at the upper turn so that no two meet, rank `r` has
//! `F0` in slot `2 r`, `F1` in `3 p - 2 - r`, `I1` in `3 p - 1 + e + 2 r` and `I0` in `6 p - 2 + e - r`, where
//! `e` is 3 for even and 0 for odd `p`. On every rank both activations together live for `6 p - 3 + e` slots up
//! to their `I`: in every period of six, about `p` overlap, half of the `2 p` of 1F1B.
//!
//! Every rank holds at most `2 (p / 2 + 1)` activations of a stage (`/` rounding down). With `F`, `I` and `W`
//! of one length and `m >= 2 p`, the bubble is `b / (6 m + b)`, `b` being `3 p - 7` for even `p >= 4` and
//! `3 p - 4` for odd `p >= 3`, against `6 (p - 1)` for 1F1B.

use crate::generate::building_block::{BuildingBlock, squeezed};
use crate::generate::catalogue::Generator;
use crate::generate::error::GenerateError;
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
