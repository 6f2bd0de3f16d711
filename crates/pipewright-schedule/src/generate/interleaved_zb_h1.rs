//! Interleaved ZB-H1: the order of interleaved 1F1B with the backward split, at the memory of 1F1B.
//!
//! Qi et al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism with Controllable Memory", 2024,
//! carried over to several stages a rank. Any number of stages a rank, in a loop, microbatches in rounds as in
//! interleaved 1F1B. What the papers call B and W are `I` and `W` here.
//!
//! With `p` ranks, `v` stages a rank and rounds of `g` microbatches, rank `r` warms up with
//! `(v - 1) g + (p - 1 - r)` forwards, then runs `F I` in turn, and a `W` after each `I` once `r` weight
//! gradients wait. The setting `wide_warmup` warms up with `(v - 1) g + 2 (p - 1 - r)` forwards instead,
//! which leaves room for the time between ranks at the price of `p - 1 - r` more activations.
//!
//! With `m` a multiple of `p`, and `F`, `I` and `W` of one length, the bubble is
//! `(p - 1) / (3 v m + p - 1)`, a `v`th of that of ZB-H1. Every rank holds at most `v p` activations of a
//! stage, as 1F1B does; with `wide_warmup` rank 0 holds `v p + p - 1`.

use crate::generate::catalogue::Generator;
use crate::generate::error::GenerateError;
use crate::generate::interleaving::Interleaving;
use crate::generate::lane::Lane;
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::generate::split_backward::{Phases, split_backward};
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
        let mut lanes = Lane::of_rank(&placement, rank);
        let order = Interleaving { chunks: lanes.len() as u32, group };
        let followers = placement.ranks() - 1 - rank.get();
        let warm_up = (order.chunks - 1) * group + slope * followers;
        split_backward(&mut lanes, order, spec.microbatches, Phases { warm_up, pending: rank.get() })
    };
    let rows = placement.all_ranks().map(row).collect();
    Ok(Schedule::generated(placement, spec.microbatches, rows))
}
