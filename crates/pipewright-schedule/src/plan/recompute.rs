//! The layers that stages recompute, to fit into the memory.
//!
//! A rank recomputes no more than it must: layer after layer is added, the ones that save the most for the
//! time of their second forward first, until the rank fits. A stage recomputes its first layers, because its
//! input is kept in any case; so the layers of each stage are added in their order. If a request does not
//! allow parts of stages, whole stages are added.

use crate::ids::{Rank, StageIndex};
use crate::placement::Placement;
use crate::plan::layers::Layers;
use crate::plan::order::{Cell, Kind, Order};
use crate::plan::peaks::{peak_of_rank, peaks};
use crate::plan::stage_load::{StageLoad, besides_microbatches, stage_load, stage_loads};
use crate::recompute::StageRecompute;
use crate::trained::StageBackward;

/// Returns the number of choices of the first layers of stages with so many layers.
pub(super) fn count_choices(counts: &[usize]) -> u64 {
    counts.iter().fold(1, |choices: u64, &count| choices.saturating_mul(count as u64 + 1))
}

/// Returns all of these choices, from none to all. If all counts are 1, they are all choices of whole stages.
pub(super) fn every_choice(counts: &[usize]) -> impl Iterator<Item = Vec<Option<StageRecompute>>> {
    (0..count_choices(counts)).map(move |number| {
        // Its digits are the numbers of layers.
        let mut rest = number;
        let next_stage = |&count: &usize| {
            let layers = rest % (count as u64 + 1);
            rest /= count as u64 + 1;
            first_layers(layers as usize, count)
        };
        counts.iter().map(next_stage).collect()
    })
}

/// Returns every choice of whole stages, from none to all; no choice if there are more than `most`.
pub(super) fn few_whole_choices(stages: usize, most: u64) -> Vec<Vec<Option<StageRecompute>>> {
    let counts = vec![1; stages];
    if count_choices(&counts) <= most { every_choice(&counts).collect() } else { Vec::new() }
}

/// Returns each different choice once, in the order of their first occurrences.
pub(super) fn without_repetitions(
    choices: Vec<Vec<Option<StageRecompute>>>,
) -> Vec<Vec<Option<StageRecompute>>> {
    let mut different: Vec<Vec<Option<StageRecompute>>> = Vec::new();
    for choice in choices {
        if !different.contains(&choice) {
            different.push(choice);
        }
    }
    different
}

/// Returns the choice with which these stages recompute all their layers.
pub(super) fn whole_stages(stages: &[bool]) -> Vec<Option<StageRecompute>> {
    stages.iter().map(|&recomputes| recomputes.then_some(StageRecompute::WHOLE)).collect()
}

/// Returns the choice of the first `layers` of the `count` layers of a stage.
pub(super) fn first_layers(layers: usize, count: usize) -> Option<StageRecompute> {
    StageRecompute::first(layers as u32).map(|choice| choice.within(count))
}

/// Returns a choice with which `order` fits into the memory: on each rank that lacks memory, the stages with
/// the largest saving recompute, one after another. If nothing helps, all stages of the rank do.
pub(super) fn stages_to_fit(
    layers: &Layers,
    starts: &[usize],
    order: &Order,
    memory: u64,
) -> Vec<Option<StageRecompute>> {
    let mut choice = vec![false; starts.len() - 1];
    loop {
        let loads = stage_loads(layers, starts, &whole_stages(&choice));
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
            return whole_stages(&choice);
        }
    }
}

/// Returns the choice of the fewest layers with which `order` fits into the memory. A rank that never fits
/// recomputes all layers.
pub(super) fn layers_to_fit(
    layers: &Layers,
    starts: &[usize],
    order: &Order,
    memory: u64,
) -> Vec<Option<StageRecompute>> {
    let mut fitting = Fitting::of(layers, starts);
    for rank in order.placement.all_ranks() {
        let own = order.placement.stages_of(rank);
        let in_flight = |stage: StageIndex| most_in_flight(&order.rows[rank.index()], stage);
        let peak = |loads: &[StageLoad]| peak_of_rank(order, loads, layers.sharding, rank.index());
        fitting.fit(own, in_flight, |loads| peak(loads) <= memory);
    }
    fitting.choice
}

/// Returns the choice of the fewest layers with which each rank can hold `wanted` microbatches of each of its
/// stages at once. A rank that never can recomputes all layers.
pub(super) fn layers_to_hold(
    layers: &Layers,
    starts: &[usize],
    placement: &Placement,
    memory: u64,
    wanted: impl Fn(usize) -> u64,
) -> Vec<Option<StageRecompute>> {
    let mut fitting = Fitting::of(layers, starts);
    for rank in placement.all_ranks() {
        let own = placement.stages_of(rank);
        let wanted = wanted(rank.index());
        let holds = |loads: &[StageLoad]| held_with(layers, loads, own, wanted) <= memory;
        fitting.fit(own, |_| wanted, holds);
    }
    fitting.choice
}

/// Returns the bytes of a rank that holds `count` microbatches of each of its stages.
fn held_with(layers: &Layers, loads: &[StageLoad], own: &[StageIndex], count: u64) -> u64 {
    let own_loads = own.iter().map(|stage| &loads[stage.index()]);
    let growth = own_loads.clone().map(StageLoad::growth).max().unwrap_or(0);
    let kept = own_loads.map(|load| load.kept).fold(0, u64::saturating_add);
    besides_microbatches(own, loads, layers.sharding)
        .saturating_add(growth)
        .saturating_add(kept.saturating_mul(count))
}

/// Returns the choice that recomputes all stages of the ranks that cannot hold `wanted` microbatches at once
/// without it.
pub(super) fn stages_to_hold(
    layers: &Layers,
    loads: &[StageLoad],
    placement: &Placement,
    memory: u64,
    wanted: impl Fn(usize) -> u64,
) -> Vec<Option<StageRecompute>> {
    let lacks = |rank: Rank| {
        let own = placement.stages_of(rank).iter().map(|stage| &loads[stage.index()]);
        let kept = own.clone().map(|load| load.kept).fold(0, u64::saturating_add);
        let fixed = StageLoad::fixed(own, layers.sharding);
        fixed.saturating_add(kept.saturating_mul(wanted(rank.index()))) > memory
    };
    let lacking: Vec<bool> = placement.all_ranks().map(lacks).collect();
    let recomputed = placement.all_stages().map(|stage| lacking[placement.rank_of(stage).index()]);
    whole_stages(&recomputed.collect::<Vec<_>>())
}

/// Returns the most microbatches of a stage that are between their forward and their backward at once.
fn most_in_flight(row: &[Cell], stage: StageIndex) -> u64 {
    let mut count = 0u64;
    let own = row.iter().filter(|cell| cell.stage == stage.get());
    let counts = own.map(|cell| {
        match cell.kind {
            Kind::Forward => count += 1,
            Kind::Input | Kind::Backward => count = count.saturating_sub(1),
            Kind::Weight => {}
        }
        count
    });
    counts.max().unwrap_or(0)
}

/// A choice in the making, rank by rank.
struct Fitting<'a> {
    layers: &'a Layers,
    starts: &'a [usize],
    choice: Vec<Option<StageRecompute>>,
    /// The loads at the choice.
    loads: Vec<StageLoad>,
}

impl<'a> Fitting<'a> {
    /// Begins with no recomputation.
    fn of(layers: &'a Layers, starts: &'a [usize]) -> Self {
        let choice = vec![None; starts.len() - 1];
        Self { layers, starts, loads: stage_loads(layers, starts, &choice), choice }
    }

    /// Adds layers of the stages of a rank until the rank fits, and at most all. `in_flight` returns the
    /// microbatches that a stage holds at once.
    fn fit(
        &mut self,
        own: &[StageIndex],
        in_flight: impl Fn(StageIndex) -> u64,
        fits: impl Fn(&[StageLoad]) -> bool,
    ) {
        if fits(&self.loads) {
            return;
        }
        let added = self.order_of_layers(own, in_flight);
        // More layers take less memory, except for small differences: bisection finds a choice that fits, if
        // all layers do.
        let (mut too_few, mut enough) = (0, added.len());
        while enough - too_few > 1 {
            let middle = too_few.midpoint(enough);
            self.set(own, &added[..middle]);
            if fits(&self.loads) {
                enough = middle;
            } else {
                too_few = middle;
            }
        }
        self.set(own, &added[..enough]);
    }

    /// Returns the stage of each layer that is added, in this order.
    fn order_of_layers(&self, own: &[StageIndex], in_flight: impl Fn(StageIndex) -> u64) -> Vec<StageIndex> {
        // A stage that runs forward only keeps nothing.
        let keeps = |stage: &&StageIndex| self.loads[stage.index()].computes != StageBackward::None;
        let mut next: Vec<(StageIndex, usize, f64)> = own
            .iter()
            .filter(keeps)
            .map(|&stage| (stage, self.starts[stage.index()], in_flight(stage) as f64))
            .collect();
        let mut added = Vec::new();
        loop {
            let left = next.iter_mut().filter(|(stage, layer, _)| *layer < self.starts[stage.index() + 1]);
            let saving = |layer: usize, held: f64| {
                let layer = &self.layers.list[layer];
                held * layer.activation as f64 / layer.recompute.max(f64::MIN_POSITIVE)
            };
            let best = left.max_by(|one, other| saving(one.1, one.2).total_cmp(&saving(other.1, other.2)));
            let Some((stage, layer, _)) = best else { return added };
            *layer += 1;
            added.push(*stage);
        }
    }

    /// Sets the choice of the stages of a rank: each recomputes as many layers as it is named.
    fn set(&mut self, own: &[StageIndex], added: &[StageIndex]) {
        for &stage in own {
            let at = stage.index();
            let range = self.starts[at]..self.starts[at + 1];
            let count = added.iter().filter(|&&other| other == stage).count();
            self.choice[at] = first_layers(count, range.len());
            self.loads[at] = stage_load(self.layers, range, self.choice[at]);
        }
    }
}
