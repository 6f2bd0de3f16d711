//! GPipe: all forwards, then all backwards, each in ascending microbatch order.
//!
//! The guide in `GENERATOR` has the paper and the formulas. Every stage holds the activations of all
//! microbatches at once, while 1F1B holds at most the activations of as many microbatches as there are ranks.

use crate::generate::generator::{Formula, Generator, Grid, Guide};
use crate::generate::phases::{Phases, one_stage};
use crate::generate::spec::ScheduleSpec;
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "gpipe",
    summary: "all forwards, then all backwards; simple, memory grows with microbatches",
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
    generate,
    ..Generator::USUAL
};

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    let phases = Phases { warm_up: spec.microbatches, pending: None };
    placement.all_stages().map(|stage| one_stage(stage, spec.microbatches, phases)).collect()
}
