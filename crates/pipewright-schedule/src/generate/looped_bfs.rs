//! Looped BFS (breadth first): all microbatches run through one stage before the rank's next stage.
//!
//! The guide in `GENERATOR` has the paper, the order and the formulas. Within a stage the backwards run from
//! the last microbatch to the first, so that the latest activations are used first. Rank `r` of `p` idles `r`
//! cells before its first forward and `2 (p - 1 - r)` cells before its first backward, the ticks until the
//! first gradient arrives from the last rank.

use std::iter::repeat_n;

use crate::action::Action;
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::spec::ScheduleSpec;
use crate::ids::{Microbatch, Rank};
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "loopedbfs",
    summary: "several stages per rank, all microbatches through one stage before the next",
    aliases: &["bfs", "breadth-first"],
    guide: Guide {
        source: "Lamy-Poirier, \"Breadth-First Pipeline Parallelism\", 2022",
        order: "There is any number of stages on each rank, placed in a loop. A rank runs its stages in \
                ascending order, each for all microbatches forward, and then its stages in descending \
                order, each for all microbatches backward. Backwards run from the last microbatch to the \
                first.",
        choice: "Choose it with sharded parameters (`mesh.data_parallel_mode = \"sharded\"`): a stage is \
                 gathered only twice in a step. Slow messages delay it little. Its memory grows with the \
                 number of microbatches. Gradients are added in descending order of the microbatches, so \
                 their last bits differ from the other schedules' gradients.",
        bubble: &[Formula::with("m >= p", "(p - 1) / (v m + p - 1)")],
        peak: &[Formula::always("v m")],
    },
    stages: StageRule::Loops,
    generate,
    ..Generator::USUAL
};

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    placement.all_ranks().map(|rank| row(placement, rank, spec.microbatches)).collect()
}

fn row(placement: &Placement, rank: Rank, microbatches: u32) -> Vec<Option<Action>> {
    let all = || (0..microbatches).map(Microbatch::new);
    let stages = placement.stages_of(rank);
    let followers = placement.ranks() as usize - 1 - rank.index();
    let idle = rank.index() + 2 * followers;
    let mut row = Vec::with_capacity(idle + 2 * stages.len() * microbatches as usize);
    row.extend(repeat_n(None, rank.index()));
    for &stage in stages {
        row.extend(all().map(|microbatch| Some(Action::Forward { stage, microbatch })));
    }
    row.extend(repeat_n(None, 2 * followers));
    for &stage in stages.iter().rev() {
        row.extend(all().rev().map(|microbatch| Some(Action::Backward { stage, microbatch })));
    }
    row
}
