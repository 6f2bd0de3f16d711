//! Interleaved zero bubble (ZB1P): interleaved 1F1B with the backward split, so that weight gradients fill
//! the cool-down.
//!
//! The guide in `GENERATOR` has the paper and the formulas. With `p` ranks, `v` stages per rank and groups of
//! `g` microbatches as in [`super::interleaved_1f1b`], rank `r` warms up with
//! `min(v m, (v - 1) g + p - 1 - r)` forwards and keeps up to `r` weight gradients pending
//! (`phases.rs`).
//!
//! The idle cells agree with the reference, in which each action has one cell: `r` before the first forward,
//! `p - 1 - r` after the warm-up, and before a forward as many as it waits for the forward of the previous
//! stage. The reference adds idle cells before full backwards only. This schedule has no full backwards, so
//! its cells do not show when gradients arrive. The order is sound nevertheless.
//! [`super::interleaved_zb_h1`] is the same order without idle cells.

use std::iter::repeat_n;

use crate::action::Action;
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::interleaving::Interleaving;
use crate::generate::phases::{Phases, steady};
use crate::generate::settings::Setting;
use crate::generate::spec::{ScheduleSpec, check_interleaving};
use crate::generate::stage_cursor::StageCursor;
use crate::ids::{Rank, StageIndex};
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "interleavedzerobubble",
    summary: "ZB1P: interleaved, backward split, weight gradients fill the cool-down",
    settings: &[Setting::GroupSize],
    aliases: &["zb1p", "interleaved-zb", "izb"],
    guide: Guide {
        source: "Qi et al., \"Zero Bubble Pipeline Parallelism\", 2023, there called ZB-H1, extended to \
                 several stages on a rank as in PyTorch",
        order: "There is any number of stages on each rank, placed in a loop, and microbatches run in \
                rounds as in interleaved 1F1B. Rank `r` warms up with `v - 1` rounds and `p - 1 - r` \
                further forwards, and then alternates `F` and `I`. It keeps up to `r` weight gradients for \
                the cool-down.",
        choice: "Choose it to compare with PyTorch: both have the same table, cell by cell. `interleaved-zb-h1` \
                 has the same order without PyTorch's idle cells.",
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
    let rows = placement.all_ranks().map(|rank| row(placement, rank, order)).collect();
    with_waits(rows, placement.stages())
}

/// The actions of a rank, idle before its first forward and after its warm-up.
fn row(placement: &Placement, rank: Rank, order: Interleaving) -> Vec<Option<Action>> {
    let followers = placement.ranks() - 1 - rank.get();
    let warm_up = order.warm_up(followers);
    let phases = Phases { warm_up, pending: Some(rank.get()) };
    let mut row = steady(&mut StageCursor::of_rank(placement, rank), order, phases);
    if warm_up > 0 {
        let at = warm_up as usize;
        row.splice(at..at, repeat_n(None, followers as usize));
    }
    row.splice(0..0, repeat_n(None, rank.index()));
    row
}

/// Runs the rows, one cell per tick, and inserts an idle cell while the input of a forward does not exist.
fn with_waits(rows: Grid, stages: u32) -> Grid {
    // Forwards of a stage run in ascending order, so their number tells which ones are done.
    let mut done = vec![0u32; stages as usize];
    let mut just_done: Vec<StageIndex> = Vec::new();
    let mut next = vec![0; rows.len()];
    let mut waited: Grid = rows.iter().map(|row| Vec::with_capacity(row.len())).collect();
    loop {
        for ((row, next), waited) in rows.iter().zip(&mut next).zip(&mut waited) {
            let Some(&cell) = row.get(*next) else { continue };
            let forward = match cell {
                Some(Action::Forward { stage, microbatch }) => Some((stage, microbatch)),
                _ => None,
            };
            let waits = forward.is_some_and(|(stage, microbatch)| {
                stage.index().checked_sub(1).is_some_and(|previous| done[previous] <= microbatch.get())
            });
            if waits {
                waited.push(None);
            } else {
                waited.push(cell);
                just_done.extend(forward.map(|(stage, _)| stage));
                *next += 1;
            }
        }
        if next.iter().zip(&rows).all(|(&next, row)| next == row.len()) {
            return waited;
        }
        for stage in just_done.drain(..) {
            done[stage.index()] += 1;
        }
    }
}
