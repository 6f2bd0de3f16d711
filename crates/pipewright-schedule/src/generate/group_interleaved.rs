//! Group-interleaved 1F1B: interleaved 1F1B with groups of fewer microbatches than there are ranks, which
//! takes less memory.
//!
//! The guide in `GENERATOR` has the paper and the formulas. There is any number of stages per rank, placed in
//! a loop.
//!
//! Notation: `p` ranks, `v` stages per rank, `m` microbatches in groups of `g`, where `p / 2 <= g <= p` and
//! `m` is a multiple of `g`. The stages of a rank alternate, each for the `g` microbatches of a group
//! (`interleaving.rs`). Rank `r` warms up with `(v - 1) g + (p - 1 - r)` forwards, then alternates a forward
//! and a backward, then runs the remaining backwards.
//!
//! A group has at least half as many microbatches as there are ranks, for this reason: backward `j` of the
//! last rank, of a chunk that is not the last one, needs backward `j - g` of rank 0, which comes after
//! forward `(v - 1) g + (p - 1) + j - g` there. That forward needs forward `(v - 1) g + (p - 1) + j - 2 g` of
//! the last rank, which has run `(v - 1) g + j` of them before its backward `j`. So the order is free of
//! cycles if and only if `p - 1 <= 2 g`.
//!
//! Rank 0 holds at most `(v - 1) g + p` activations of a stage, which is `v p` at `g = p`, as for 1F1B, and
//! about half as many at `g = p / 2` and large `v`. The price is idle time: a rank waits for `p - g` forwards
//! at each of the `v - 1` changes of chunk in the warm-up. In the steady state it waits if `g` forwards and
//! backwards take less time than a gradient needs to pass `p` ranks. If a backward takes as long as two
//! forwards, that is the case for `3 g < 2 p`.

use crate::generate::error::GenerateErrorKind;
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::interleaving::Interleaving;
use crate::generate::phases::{Phases, steady};
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_cursor::StageCursor;
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "group-interleaved",
    summary: "interleaved 1F1B in smaller groups; down to half the memory",
    settings: &[Setting::GroupSize],
    aliases: &["grouped-interleaved"],
    guide: Guide {
        source: "Wan et al., \"PipeOffload: Improving Scalability of Pipeline Parallelism with Memory \
                 Optimization\", 2025, there the generalised interleaved schedule",
        order: "There is any number of stages on each rank, placed in a loop. The stages of a rank \
                alternate, each for the `g` microbatches of a group, from half of `p` to `p`. A rank warms \
                up with forwards, then alternates a forward and a backward, and ends with the remaining \
                backwards.",
        choice: "Choose it if interleaved 1F1B does not fit into the memory and the layers cannot defer \
                 their weight gradients. A smaller group holds fewer activations and idles more. `m` is a \
                 multiple of `g`.",
        bubble: &[Formula::with("g = p", "(p - 1) / (v m + p - 1)")],
        peak: &[Formula::always("min(v m, (v - 1) g + p)")],
    },
    stages: StageRule::Loops,
    check,
    generate,
    ..Generator::USUAL
};

/// Refuses a group size that is out of range, or that does not divide the number of microbatches.
fn check(
    _schedule: &'static str,
    spec: &ScheduleSpec,
    _stages_per_rank: u32,
) -> Result<(), GenerateErrorKind> {
    let ScheduleSpec { ranks, microbatches, .. } = *spec;
    let group_size = spec.group_size_from(spec.group_size.unwrap_or(ranks), ranks.div_ceil(2), ranks)?;
    if !microbatches.is_multiple_of(group_size) {
        return Err(GenerateErrorKind::UnevenGroups { microbatches, group_size });
    }
    Ok(())
}

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    let (microbatches, group) = (spec.microbatches, spec.group_size.unwrap_or(spec.ranks));
    let row = |rank| {
        let mut cursors = StageCursor::of_rank(placement, rank);
        let order = Interleaving { chunks: cursors.len() as u32, group, microbatches };
        let warm_up = order.warm_up(placement.ranks() - 1 - rank.get());
        steady(&mut cursors, order, Phases { warm_up, pending: None })
    };
    placement.all_ranks().map(row).collect()
}
