//! Interleaved ZB-H1: the order of interleaved 1F1B with the backward split, at the memory of 1F1B.
//!
//! Qi et al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism with Controllable Memory", 2024,
//! extended to several stages a rank. There is any number of stages a rank, placed in a loop, and microbatches run in
//! rounds as in interleaved 1F1B. The papers' B and W are `I` and `W` here.
//!
//! With `p` ranks, `v` stages a rank and rounds of `g` microbatches, rank `r` warms up with `(v - 1) g + (p - 1 - r)`
//! forwards, then repeats `F I`, with a `W` after each `I` once `r` weight gradients are pending. The setting
//! `wide_warmup` warms up with `(v - 1) g + 2 (p - 1 - r)` forwards instead, which hides the latency of messages and
//! costs `p - 1 - r` more activations.
//!
//! With `m` a multiple of `p`, and `F`, `I` and `W` of one length, the bubble is `(p - 1) / (3 v m + p - 1)`, about a
//! `v`th of the bubble of ZB-H1. Every rank holds at most `v p` activations of a stage, as 1F1B does. With
//! `wide_warmup`, rank 0 holds `v p + p - 1`.

use crate::generate::error::GenerateError;
use crate::generate::generator::Generator;
use crate::generate::interleaving::Interleaving;
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::generate::split_backward::{Phases, split_backward};
use crate::generate::stage_cursor::StageCursor;
use crate::schedule::Schedule;

const NAME: &str = "interleaved-zb-h1";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "ZB-H1 with several stages a rank; smallest bubble at the memory of 1F1B",
    settings: &[Setting::WideWarmup],
    aliases: &["interleaved-h1"],
    generate,
};

fn generate(spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    let placement = spec.looped()?;
    let group = spec.microbatches_per_round(NAME)?;
    let slope = if spec.wide_warmup { 2 } else { 1 };
    let row = |rank| {
        let mut cursors = StageCursor::of_rank(&placement, rank);
        let order = Interleaving { chunks: cursors.len() as u32, group };
        let followers = placement.ranks() - 1 - rank.get();
        let warm_up = (order.chunks - 1) * group + slope * followers;
        split_backward(&mut cursors, order, spec.microbatches, Phases { warm_up, pending: rank.get() })
    };
    let rows = placement.all_ranks().map(row).collect();
    Ok(Schedule::generated(placement, spec.microbatches, rows))
}
