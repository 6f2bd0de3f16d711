//! ZB-H1: 1F1B with a split backward, which has a third of the bubble and the same memory.
//!
//! The guide in `GENERATOR` has the paper, the order and the formulas. The paper's B and W are `I` and `W`
//! here. Fewer microbatches than ranks are allowed, but then the pipeline is never full.
//!
//! If `F`, `I` and `W` take `f`, `i` and `w` on every stage, the bubble is
//! `(p - 1) (f + i - w) / (m (f + i + w) + (p - 1) (f + i - w))` for `m >= p` and `w <= i`.

use crate::action::Action;
use crate::generate::generator::Generator;
use crate::generate::guide::{Formula, Guide};
use crate::generate::spec::ScheduleSpec;
use crate::generate::split_backward::{Phases, one_stage};
use crate::generate::stage_rule::StageRule;
use crate::ids::StageIndex;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::slices::Slices;

const NAME: &str = "zb-h1";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "1F1B, backward split; a third of the bubble, same memory",
    settings: &[],
    trains: true,
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
    stages: StageRule::One,
    actions: 3,
    slices: Slices::ONE,
    check: |_, _| Ok(()),
    generate,
};

fn generate(spec: &ScheduleSpec, placement: Placement) -> Schedule {
    let rows = rows(placement.ranks(), spec.microbatches);
    Schedule::generated(placement, spec.microbatches, rows)
}

/// Makes the rows of all ranks.
pub(super) fn rows(ranks: u32, microbatches: u32) -> Vec<Vec<Option<Action>>> {
    let phases = |rank| Phases { warm_up: ranks - 1 - rank, pending: rank };
    (0..ranks).map(|rank| one_stage(StageIndex::new(rank), microbatches, phases(rank))).collect()
}
