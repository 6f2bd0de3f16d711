//! Group-interleaved 1F1B: interleaved 1F1B whose turns are shorter than the ranks are many, for less memory.
//!
//! The generalised interleaved schedule of Wan et al., "PipeOffload: Improving Scalability of Pipeline
//! Parallelism with Memory Optimization", 2025. Any number of stages a rank, in a loop.
//!
//! Notation: `p` ranks, `v` stages a rank, groups of `g` microbatches, `p / 2 <= g <= p`, of which `m` is a
//! multiple. The rank's stages take turns, each for the `g` microbatches of a group (`interleaving.rs`). Rank
//! `r` warms up with `(v - 1) g + (p - 1 - r)` forwards, then runs a forward and a backward in turn, then the
//! remaining backwards.
//!
//! Why not less than half the ranks: backward `j` of the last rank, of a chunk that is not the last one, needs
//! backward `j - g` of rank 0, which comes after forward `(v - 1) g + (p - 1) + j - g` there. That forward
//! needs forward `(v - 1) g + (p - 1) + j - 2 g` of the last rank, which has run `(v - 1) g + j` of them
//! before its backward `j`. So the order is free of cycles exactly when `p - 1 <= 2 g`.
//!
//! Rank 0 holds at most `(v - 1) g + p` activations of a stage, `v p` of them at `g = p`, as 1F1B does, and
//! about half as many at `g = p / 2` and large `v`. A group of `g` keeps the others waiting for `p - g` forwards at
//! each of the `v - 1` turns of the warm-up, and in the steady state wherever `g` forwards and backwards take less
//! time than a gradient needs to climb `p` ranks, that is for `3 g < 2 p` where a backward takes as long as two
//! forwards.

use crate::action::Action;
use crate::generate::catalogue::Generator;
use crate::generate::error::GenerateError;
use crate::generate::interleaving::Interleaving;
use crate::generate::lane::Lane;
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::schedule::Schedule;

const NAME: &str = "group-interleaved";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "interleaved 1F1B in smaller groups; down to half the memory",
    settings: &[Setting::Group],
    aliases: &["grouped-interleaved"],
    generate,
};

fn generate(spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    let placement = spec.looped()?;
    let group = checked_group(spec)?;
    let row = |rank| {
        let mut lanes = Lane::of_rank(&placement, rank);
        let order = Interleaving { chunks: lanes.len() as u32, group };
        let warm_up = (order.chunks - 1) * group + (placement.ranks() - 1 - rank.get());
        forward_backward(&mut lanes, order, spec.microbatches, warm_up)
    };
    let rows = placement.all_ranks().map(row).collect();
    Ok(Schedule::generated(placement, spec.microbatches, rows))
}

/// The group that is asked for, the number of ranks where none is.
fn checked_group(spec: &ScheduleSpec) -> Result<u32, GenerateError> {
    let ScheduleSpec { ranks, microbatches, .. } = *spec;
    let smallest = ranks.div_ceil(2);
    let group = spec.group.unwrap_or(ranks);
    if !(smallest..=ranks).contains(&group) {
        return Err(GenerateError::Group { group, ranks, smallest });
    }
    if !microbatches.is_multiple_of(group) {
        return Err(GenerateError::UnevenGroups { microbatches, group });
    }
    Ok(group)
}

/// Warm-up, then a forward and a backward in turn, then the backwards that are left.
fn forward_backward(
    lanes: &mut [Lane],
    order: Interleaving,
    microbatches: u32,
    warm_up: u32,
) -> Vec<Option<Action>> {
    let all = order.chunks * microbatches;
    let warm_up = warm_up.min(all);
    let mut row = Vec::with_capacity(2 * all as usize);
    row.extend((0..warm_up).map(|op| Some(lanes[order.forward(op)].forward())));
    for op in 0..all {
        if warm_up + op < all {
            row.push(Some(lanes[order.forward(warm_up + op)].forward()));
        }
        row.push(Some(lanes[order.backward(op)].backward()));
    }
    row
}
