//! The peak memory of each rank for an order: the same bytes as [`crate::simulate::peak_memory`] gives for
//! the program that trains, and what is not in a simulation: what a rank holds all the time, only while an
//! action runs, or between two of its stages. The memory of a rank depends on the order of its row alone,
//! because a rank computes one thing at a time.

use crate::ids::{Rank, StageIndex};
use crate::plan::order::{Cell, Kind, Order};
use crate::plan::second_forwards::is_recomputed;
use crate::plan::stage_load::{StageLoad, beside, held_throughout};
use crate::recompute::KeptForwards;
use crate::sharding::Sharding;

/// Returns the peak bytes of each rank: parameters, optimizer state, gradients and activations, and what is
/// held only while actions run.
pub(super) fn peaks(order: &Order, loads: &[StageLoad], sharding: Sharding) -> Vec<u64> {
    let trains = order.rows.iter().any(|row| trains(row, loads));
    (0..order.rows.len()).map(|rank| peak(order, loads, sharding, rank, trains)).collect()
}

/// Returns the peak bytes of one rank of an order that trains.
pub(super) fn peak_of_rank(order: &Order, loads: &[StageLoad], sharding: Sharding, rank: usize) -> u64 {
    peak(order, loads, sharding, rank, true)
}

/// Returns whether a row has backwards.
fn trains(row: &[Cell], loads: &[StageLoad]) -> bool {
    row.iter().any(|cell| cell.kind != Kind::Forward && !cell.is_dropped(loads))
}

fn peak(order: &Order, loads: &[StageLoad], sharding: Sharding, rank: usize, trains: bool) -> u64 {
    let own = order.placement.stages_of(Rank::new(rank as u32));
    let mut held = held_throughout(own, loads, sharding);
    let mut peak = held;
    let mut with_gradient: Vec<u32> = Vec::new();
    let row = &order.rows[rank];
    let own_loads: Vec<StageLoad> = own.iter().map(|&stage| beside(stage, own, loads)).collect();
    let mut kept = vec![KeptForwards::default(); own.len()];
    let is_dropped = |cell: Cell| cell.is_dropped(loads);
    for (position, cell) in row.iter().enumerate().filter(|&(_, &cell)| !is_dropped(cell)) {
        let chunk = order.placement.chunk_of(StageIndex::new(cell.stage)).index();
        let load = &own_loads[chunk];
        let is_again = is_recomputed(load.recompute, &mut kept[chunk], row, position, is_dropped);
        let (mut more, mut less) = match cell.kind {
            Kind::Forward if trains && is_again => (load.kept, 0),
            Kind::Forward if trains => (load.activation(), 0),
            Kind::Forward => (load.activation(), load.activation()),
            Kind::Input | Kind::Backward if is_again => (load.rebuilt, load.activation()),
            Kind::Input | Kind::Backward => (0, load.activation()),
            Kind::Weight => (0, load.stash),
        };
        if matches!(cell.kind, Kind::Input | Kind::Backward) {
            more = more.saturating_add(load.remade);
            less = less.saturating_add(load.remade);
        }
        held = held.saturating_add(more);
        peak = peak.max(held.saturating_add(load.temporary));
        let mut made = if cell.kind == Kind::Input { load.stash } else { 0 };
        let weighs = matches!(cell.kind, Kind::Weight | Kind::Backward);
        if weighs && !with_gradient.contains(&cell.stage) {
            // One parameter after the other gets its gradient, and what that needed is freed.
            with_gradient.push(cell.stage);
            made = load.gradient;
        }
        held = held.saturating_add(made).saturating_sub(less);
        peak = peak.max(held.saturating_add(load.temporary));
    }
    peak
}
