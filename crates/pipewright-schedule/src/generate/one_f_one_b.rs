//! 1F1B: a forward and a backward alternately, so that no stage holds more microbatches than there are
//! stages.
//!
//! The guide in `GENERATOR` has the papers and the formulas. Stage `s` of `p` warms up with `min(m, p - s)`
//! forwards, then alternates a backward and a forward while forwards remain, and cools down with the
//! remaining backwards. It holds the activations of at most `min(m, p - s)` microbatches.

use crate::action::Action;
use crate::generate::generator::Generator;
use crate::generate::guide::{Formula, Guide};
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_rule::StageRule;
use crate::ids::{Microbatch, StageIndex};
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::slices::Slices;

const NAME: &str = "1f1b";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "one forward, one backward in turn; memory bounded by the ranks",
    settings: &[],
    trains: true,
    aliases: &["pipedream-flush", "pipedream"],
    guide: Guide {
        source: "Narayanan et al., \"PipeDream: Generalized Pipeline Parallelism for DNN Training\", 2019, \
                 with the flush at the end of a step from \"Memory-Efficient Pipeline-Parallel DNN \
                 Training\", 2021",
        order: "There is one stage on each rank. Rank `r` warms up with `p - r` forwards, then alternates a \
                backward and a forward while forwards remain, and ends with the remaining backwards.",
        choice: "It is the default of `pipewright train`. Choose it if the layers cannot defer their weight \
                 gradients, or if there are too few layers for several stages on each rank. Rank `r` holds \
                 `p - r` activations, so the first ranks need the most memory. Slow messages delay every \
                 microbatch.",
        bubble: &[Formula::always("(p - 1) / (m + p - 1)")],
        peak: &[Formula::always("min(m, p)")],
    },
    stages: StageRule::One,
    actions: 2,
    slices: Slices::ONE,
    check: |_, _| Ok(()),
    generate,
};

fn generate(spec: &ScheduleSpec, placement: Placement) -> Schedule {
    let stages = placement.stages();
    let row = |stage: StageIndex| row(stage, stages - stage.get(), spec.microbatches);
    let rows = placement.all_stages().map(row).collect();
    Schedule::generated(placement, spec.microbatches, rows)
}

/// Makes the row of a stage that runs `warm_up` forwards, or all, before its first backward.
pub(super) fn row(stage: StageIndex, warm_up: u32, microbatches: u32) -> Vec<Option<Action>> {
    let forward = |microbatch| Some(Action::Forward { stage, microbatch: Microbatch::new(microbatch) });
    let backward = |microbatch| Some(Action::Backward { stage, microbatch: Microbatch::new(microbatch) });
    let warm_up = microbatches.min(warm_up);
    let mut row = Vec::with_capacity(2 * microbatches as usize);
    row.extend((0..warm_up).map(forward));
    for finished in 0..microbatches {
        row.push(backward(finished));
        if warm_up + finished < microbatches {
            row.push(forward(warm_up + finished));
        }
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_holds_no_more_than_follow_it() {
        let (stages, microbatches) = (5, 12);
        for stage in (0..stages).map(StageIndex::new) {
            let (mut held, mut peak) = (0u32, 0);
            for action in row(stage, stages - stage.get(), microbatches).into_iter().flatten() {
                held = if matches!(action, Action::Forward { .. }) { held + 1 } else { held - 1 };
                peak = peak.max(held);
            }
            assert_eq!(peak, stages - stage.get());
        }
    }
}
