//! ZB-H1: 1F1B with a split backward, which has a third of the bubble and the same memory.
//!
//! The guide in `GENERATOR` has the paper, the order and the formulas. The paper's B and W are `I` and `W`
//! here. Fewer microbatches than ranks are allowed, but then the pipeline is never full.
//!
//! If `F`, `I` and `W` take `f`, `i` and `w` on every stage, the bubble is
//! `(p - 1) (f + i - w) / (m (f + i + w) + (p - 1) (f + i - w))` for `m >= p` and `w <= i`.

use crate::generate::generator::{Formula, Generator, Grid, Guide};
use crate::generate::phases::{Phases, one_stage};
use crate::generate::spec::ScheduleSpec;
use crate::ids::StageIndex;
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "zb-h1",
    summary: "1F1B, backward split; a third of the bubble, same memory",
    aliases: &["h1"],
    guide: Guide {
        source: "Qi et al., \"Zero Bubble Pipeline Parallelism\", 2023",
        order: "There is one stage on each rank. Rank `r` warms up with `p - 1 - r` forwards and then \
                repeats `F I`. Once `r` weight gradients are pending, a `W` follows each `I`. The pending \
                ones fill the cool-down.",
        choice: "Choose it instead of 1F1B if the layers defer their weight gradients: it has a third of \
                 the bubble, and no rank holds more than the first rank of 1F1B. Unlike with 1F1B, all \
                 ranks hold that much.",
        bubble: &[Formula::with("m >= p", "(p - 1) / (3 m + p - 1)")],
        peak: &[Formula::always("min(m, p)")],
    },
    actions: 3,
    generate,
    ..Generator::USUAL
};

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    rows(placement.ranks(), spec.microbatches)
}

/// Makes the rows of all ranks.
pub(super) fn rows(ranks: u32, microbatches: u32) -> Grid {
    let phases = |rank| Phases { warm_up: ranks - 1 - rank, pending: Some(rank) };
    (0..ranks).map(|rank| one_stage(StageIndex::new(rank), microbatches, phases(rank))).collect()
}
