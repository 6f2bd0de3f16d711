//! Interleaved ZB-H1: the order of interleaved 1F1B with the backward split, at the memory of 1F1B.
//!
//! The guide in `GENERATOR` has the papers and the formulas. The papers' B and W are `I` and `W` here.
//!
//! With `p` ranks, `v` stages per rank and groups of `g` microbatches, rank `r` warms up with
//! `(v - 1) g + (p - 1 - r)` forwards, then repeats `F I`, with a `W` after each `I` once `r` weight
//! gradients are pending. The setting `wide_warmup` warms up with `(v - 1) g + 2 (p - 1 - r)` forwards
//! instead (fewer before a short last group, as in [`super::interleaved_1f1b`]), which hides the latency of
//! messages and costs `p - 1 - r` more activations: rank 0 then holds `v p + p - 1`. The bubble is about a
//! `v`th of ZB-H1's.

use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::phases::{Phases, steady};
use crate::generate::settings::Setting;
use crate::generate::spec::{ScheduleSpec, check_interleaving};
use crate::generate::stage_cursor::StageCursor;
use crate::placement::Placement;

const NAME: &str = "interleaved-zb-h1";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "ZB-H1 with several stages per rank; smallest bubble at the memory of 1F1B",
    settings: &[Setting::GroupSize, Setting::WideWarmup],
    aliases: &["interleaved-h1"],
    guide: Guide {
        source: "Qi et al., \"Zero Bubble Pipeline Parallelism\", 2023, and \"Pipeline Parallelism with \
                 Controllable Memory\", 2024, extended to several stages on a rank",
        order: "There is any number of stages on each rank, placed in a loop, and microbatches run in \
                rounds as in interleaved 1F1B. Rank `r` warms up with `v - 1` rounds and `p - 1 - r` \
                further forwards, then repeats `F I`, with a `W` after each `I` once `r` weight gradients \
                are pending.",
        choice: "Choose it if the layers defer their weight gradients and the model has at least `v` layers \
                 for each rank: each further stage on a rank shortens the bubble, and the memory stays the same as \
                 with 1F1B. Slow messages cost it much with many stages; `wide_warmup` hides some of them and \
                 holds up to `p - 1` activations more.",
        bubble: &[Formula::with("m is a multiple of p", "(p - 1) / (3 v m + p - 1)")],
        peak: &[Formula::with("m is a multiple of p", "v p")],
    },
    stages: StageRule::Loops,
    actions: 3,
    check: check_interleaving,
    generate,
    ..Generator::USUAL
};

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    let order = spec.checked_interleaving(placement);
    let row = |rank| {
        let mut cursors = StageCursor::of_rank(placement, rank);
        let followers = placement.ranks() - 1 - rank.get();
        let warm_up = if spec.wide_warmup {
            order.wide_warm_up(followers, 0, placement.ranks())
        } else {
            order.warm_up(followers)
        };
        steady(&mut cursors, order, Phases { warm_up, pending: Some(rank.get()) })
    };
    placement.all_ranks().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::generate;
    use crate::level::Level;
    use crate::lower::{LowerConfig, lower};

    #[test]
    fn every_group_of_a_wide_warmup_is_sound() {
        for ranks in 1..=7 {
            for (stages, microbatches) in (1..=3).flat_map(|stages| (1..=18).map(move |m| (stages, m))) {
                for group_size in ranks.min(microbatches)..=microbatches {
                    let spec = ScheduleSpec {
                        ranks,
                        stages_per_rank: Some(stages),
                        microbatches,
                        group_size: Some(group_size),
                        wide_warmup: true,
                        ..ScheduleSpec::default()
                    };
                    let schedule = generate(NAME, &spec).unwrap_or_else(|error| panic!("{error}"));
                    let program = lower(&schedule, &LowerConfig::from(Level::Compute));
                    assert!(program.is_ok(), "{spec:?}: {:?}", program.err());
                }
            }
        }
    }
}
