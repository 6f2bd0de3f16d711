//! The stages that recompute their forward, to fit into the memory.

use crate::plan::evaluate::peaks;
use crate::plan::layers::Layers;
use crate::plan::order::Order;
use crate::plan::stage_load::{StageLoad, stage_loads};

/// The largest number of stages for which all choices are tried.
pub(super) const ALL_CHOICES: usize = 6;

/// Returns all choices for so many stages, from none to all.
pub(super) fn every_choice(stages: usize) -> impl Iterator<Item = Vec<bool>> {
    (0..1u32 << stages).map(move |bits| (0..stages).map(|stage| bits >> stage & 1 == 1).collect())
}

/// Returns a choice with which `order` fits into the memory: on each rank that lacks memory, the stages with the
/// largest saving recompute, one after another. If nothing helps, all stages of the rank do.
pub(super) fn to_fit(layers: &Layers, starts: &[usize], order: &Order, memory: u64) -> Vec<bool> {
    let mut choice = vec![false; starts.len() - 1];
    loop {
        let loads = stage_loads(layers, starts, &choice);
        let peaks = peaks(order, &loads);
        let mut changed = false;
        for (rank, _) in order.placement.all_ranks().zip(peaks).filter(|&(_, peak)| peak > memory) {
            let own = order.placement.stages_of(rank).iter().map(|stage| stage.index());
            let further = own.filter(|&stage| !choice[stage]).max_by_key(|&stage| loads[stage].kept);
            if let Some(stage) = further {
                choice[stage] = true;
                changed = true;
            }
        }
        if !changed {
            return choice;
        }
    }
}

/// Returns the choice that recomputes all stages of some ranks: those that cannot hold `wanted` microbatches at once
/// without it.
pub(super) fn to_hold(
    loads: &[StageLoad],
    rank_of: &[u32],
    memory: u64,
    wanted: impl Fn(usize) -> u64,
) -> Vec<bool> {
    let ranks = rank_of.iter().max().map_or(0, |&last| last as usize + 1);
    let (mut fixed, mut kept) = (vec![0u64; ranks], vec![0u64; ranks]);
    for (stage, load) in loads.iter().enumerate() {
        let rank = rank_of[stage] as usize;
        fixed[rank] = fixed[rank].saturating_add(load.fixed).saturating_add(load.gradient);
        kept[rank] = kept[rank].saturating_add(load.kept);
    }
    let lacks = |rank: usize| fixed[rank].saturating_add(kept[rank].saturating_mul(wanted(rank))) > memory;
    (0..loads.len()).map(|stage| lacks(rank_of[stage] as usize)).collect()
}
