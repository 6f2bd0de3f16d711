//! 1F1B: a forward and a backward alternately, so that no stage holds more microbatches than there are
//! stages.
//!
//! The guide in `GENERATOR` has the papers and the formulas. Stage `s` of `p` warms up with `min(m, p - s)`
//! forwards, then alternates a backward and a forward while forwards remain, and cools down with the
//! remaining backwards. It holds the activations of at most `min(m, p - s)` microbatches.

use crate::action::Action;
use crate::generate::generator::{Formula, Generator, Grid, Guide};
use crate::generate::phases::{Phases, one_stage};
use crate::generate::spec::ScheduleSpec;
use crate::ids::StageIndex;
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "1f1b",
    summary: "one forward, one backward in turn; memory bounded by the ranks",
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
    generate,
    ..Generator::USUAL
};

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    let row = |stage: StageIndex| row(stage, placement.stages() - stage.get(), spec.microbatches);
    placement.all_stages().map(row).collect()
}

/// Makes the row of a stage that runs `warm_up` forwards, or all, before its first backward.
pub(super) fn row(stage: StageIndex, warm_up: u32, microbatches: u32) -> Vec<Option<Action>> {
    // The last forward of the warm-up begins the steady state.
    one_stage(stage, microbatches, Phases { warm_up: warm_up - 1, pending: None })
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
