//! ZB-H2: no rank idles between its first and its last action, at about twice the memory of 1F1B.
//!
//! Qi et al., "Zero Bubble Pipeline Parallelism", 2023. There is one stage a rank. The paper's B and W are `I` and `W`
//! here.
//!
//! Rank `r` of `p` warms up with `2 (p - 1 - r)` forwards, which is enough work until the first gradient arrives, then
//! repeats `F I`, with a `W` after each `I` once `2 r` weight gradients are pending. Fewer microbatches than `2 p - 1`
//! are allowed, but then the pipeline is never full.
//!
//! With `m >= 2 p - 1` and `F`, `I` and `W` of one length, the ranks run without a gap, each one tick after the
//! previous one. From barrier to barrier the bubble is `(p - 1) / (3 m + p - 1)`, as for ZB-H1. With an optimizer that
//! does not wait for all ranks there is none. Every rank holds at most `min(m, 2 p - 1)` activations.

use crate::action::Action;
use crate::generate::error::GenerateError;
use crate::generate::generator::Generator;
use crate::generate::spec::ScheduleSpec;
use crate::generate::split_backward::{Phases, one_stage};
use crate::ids::StageIndex;
use crate::schedule::Schedule;

const NAME: &str = "zb-h2";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "no idle rank between first and last action, twice the memory of 1F1B",
    settings: &[],
    aliases: &["h2"],
    generate,
};

fn generate(spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    let placement = spec.one_stage_a_rank(NAME)?;
    let rows = rows(placement.ranks(), spec.microbatches);
    Ok(Schedule::generated(placement, spec.microbatches, rows))
}

/// Makes the rows of all ranks.
pub(super) fn rows(ranks: u32, microbatches: u32) -> Vec<Vec<Option<Action>>> {
    let phases = |rank| Phases { warm_up: 2 * (ranks - 1 - rank), pending: 2 * rank };
    (0..ranks).map(|rank| one_stage(StageIndex::new(rank), microbatches, phases(rank))).collect()
}
