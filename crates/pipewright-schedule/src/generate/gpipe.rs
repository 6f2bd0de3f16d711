//! GPipe: all forwards, then all backwards, each in ascending microbatch order.
//!
//! The guide in `GENERATOR` has the paper and the formulas. Every stage holds the activations of all
//! microbatches at once, while 1F1B holds at most the activations of as many microbatches as there are ranks.

use crate::action::Action;
use crate::generate::generator::Generator;
use crate::generate::guide::{Formula, Guide};
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_rule::StageRule;
use crate::ids::{Microbatch, StageIndex};
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::slices::Slices;

const NAME: &str = "gpipe";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "all forwards, then all backwards; simple, memory grows with microbatches",
    settings: &[],
    trains: true,
    aliases: &["afab"],
    guide: Guide {
        source: "Huang et al., \"GPipe: Efficient Training of Giant Neural Networks using Pipeline \
                 Parallelism\", 2019",
        order: "There is one stage on each rank. A rank runs all forwards and then all backwards, both in \
                ascending order of the microbatches.",
        choice: "It is a baseline for the other schedules. It has the bubble of 1F1B, and it holds the \
                 activations of `m` microbatches instead of `p`. Slow messages delay it less than 1F1B, \
                 because no forward waits for a backward.",
        bubble: &[Formula::always("(p - 1) / (m + p - 1)")],
        peak: &[Formula::always("m")],
    },
    stages: StageRule::One,
    actions: 2,
    slices: Slices::ONE,
    check: |_, _| Ok(()),
    generate,
};

fn generate(spec: &ScheduleSpec, placement: Placement) -> Schedule {
    let rows = placement.all_stages().map(|stage| row(stage, spec.microbatches)).collect();
    Schedule::generated(placement, spec.microbatches, rows)
}

fn row(stage: StageIndex, microbatches: u32) -> Vec<Option<Action>> {
    let all = || (0..microbatches).map(Microbatch::new);
    let forwards = all().map(|microbatch| Some(Action::Forward { stage, microbatch }));
    let backwards = all().map(|microbatch| Some(Action::Backward { stage, microbatch }));
    forwards.chain(backwards).collect()
}
