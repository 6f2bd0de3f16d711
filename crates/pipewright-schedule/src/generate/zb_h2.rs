//! ZB-H2: no rank idles between its first and its last action, at about twice the memory of 1F1B.
//!
//! The guide in `GENERATOR` has the paper, the order and the formulas. The paper's B and W are `I` and `W`
//! here. Fewer microbatches than `2 p - 1` are allowed, but then the pipeline is never full.
//!
//! With `m >= 2 p - 1` and `F`, `I` and `W` of one length, the ranks run without a gap, each one tick after
//! the previous one. From barrier to barrier the bubble equals ZB-H1's. With an optimizer that does not wait
//! for all ranks there is none.

use crate::generate::generator::{Formula, Generator, Grid, Guide};
use crate::generate::phases::{Phases, one_stage};
use crate::generate::spec::ScheduleSpec;
use crate::ids::StageIndex;
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "zb-h2",
    summary: "no idle rank between first and last action, twice the memory of 1F1B",
    aliases: &["h2"],
    guide: Guide {
        source: "Qi et al., \"Zero Bubble Pipeline Parallelism\", 2023",
        order: "There is one stage on each rank. Rank `r` warms up with `2 (p - 1 - r)` forwards, which is \
                enough work until the first gradient arrives, and then repeats `F I`, with a `W` after each \
                `I` once `2 r` weight gradients are pending.",
        choice: "Choose it instead of ZB-H1 if messages are slow or the actions differ in length, and there \
                 is memory for twice the activations. With equal lengths it has the bubble of ZB-H1, \
                 because a step of Pipewright ends with a gradient norm over all ranks: no rank idles \
                 between its first and its last action, but the ranks start and end one after the other.",
        bubble: &[Formula::with("m >= 2 p - 1", "(p - 1) / (3 m + p - 1)")],
        peak: &[Formula::always("min(m, 2 p - 1)")],
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
    let phases = |rank| Phases { warm_up: 2 * (ranks - 1 - rank), pending: Some(2 * rank) };
    (0..ranks).map(|rank| one_stage(StageIndex::new(rank), microbatches, phases(rank))).collect()
}
