//! Forward-only: every microbatch runs forward through every stage, and there is no backward.
//!
//! For evaluation and inference, not for training. The guide in `GENERATOR` has the formulas.

use crate::action::Action;
use crate::generate::generator::{Formula, Generator, Grid, Guide};
use crate::generate::spec::ScheduleSpec;
use crate::ids::{Microbatch, StageIndex};
use crate::placement::Placement;

const NAME: &str = "forwardonly";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "forward of every microbatch, no backward; for evaluation",
    trains: false,
    aliases: &["forward"],
    guide: Guide {
        source: "the forwards of GPipe",
        order: "There is one stage on each rank. All microbatches run forward through all stages, in \
                ascending order. A rank frees an activation when its forward ends.",
        choice: "It is for predictions of evaluation and inference. It cannot train. `pipewright train` \
                 evaluates with the forwards of the schedule that trains.",
        bubble: &[Formula::always("(p - 1) / (m + p - 1)")],
        peak: &[Formula::always("1")],
    },
    actions: 1,
    generate,
    ..Generator::USUAL
};

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    placement.all_stages().map(|stage| row(stage, spec.microbatches)).collect()
}

fn row(stage: StageIndex, microbatches: u32) -> Vec<Option<Action>> {
    (0..microbatches)
        .map(Microbatch::new)
        .map(|microbatch| Some(Action::Forward { stage, microbatch }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::print_schedule;

    #[test]
    fn fewer_microbatches_than_stages_are_fine() {
        let spec = ScheduleSpec { ranks: 3, microbatches: 2, ..ScheduleSpec::default() };
        let schedule = crate::generate::generate(NAME, &spec).expect("a schedule");
        assert_eq!(print_schedule(&schedule), "0F0,0F1\n1F0,1F1\n2F0,2F1\n");
    }
}
