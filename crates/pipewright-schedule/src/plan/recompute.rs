//! The stages that recompute their forward, to fit into the memory.

use crate::plan::layers::Layers;
use crate::plan::order::Order;
use crate::plan::peaks::peaks;
use crate::plan::stage_load::{StageLoad, stage_loads};
use crate::sharding::Sharding;

/// Returns all choices for so many stages, from none to all.
pub(super) fn every_choice(stages: usize) -> impl Iterator<Item = Vec<bool>> {
    (0..1u32 << stages).map(move |bits| (0..stages).map(|stage| bits >> stage & 1 == 1).collect())
}

/// Returns a choice with which `order` fits into the memory: on each rank that lacks memory, the stages with
/// the largest saving recompute, one after another. If nothing helps, all stages of the rank do.
pub(super) fn to_fit(layers: &Layers, starts: &[usize], order: &Order, memory: u64) -> Vec<bool> {
    let mut choice = vec![false; starts.len() - 1];
    loop {
        let loads = stage_loads(layers, starts, &choice);
        let peaks = peaks(order, &loads, layers.sharding);
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

/// Returns the choice that recomputes all stages of the ranks that cannot hold `wanted` microbatches at once
/// without it.
pub(super) fn to_hold(
    loads: &[StageLoad],
    rank_of: &[u32],
    sharding: Sharding,
    memory: u64,
    wanted: impl Fn(usize) -> u64,
) -> Vec<bool> {
    let ranks = rank_of.iter().max().map_or(0, |&last| last as usize + 1);
    let lacks = |rank: usize| {
        let own = loads.iter().zip(rank_of).filter(|&(_, &of)| of as usize == rank).map(|(load, _)| load);
        let kept = own.clone().map(|load| load.kept).fold(0, u64::saturating_add);
        StageLoad::fixed(own, sharding).saturating_add(kept.saturating_mul(wanted(rank))) > memory
    };
    let lacking: Vec<bool> = (0..ranks).map(lacks).collect();
    rank_of.iter().map(|&rank| lacking[rank as usize]).collect()
}
