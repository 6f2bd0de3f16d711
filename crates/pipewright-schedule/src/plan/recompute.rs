//! The layers that stages recompute, to fit into the memory.
//!
//! A rank recomputes no more than it must: layer after layer, or a part of all layers of a stage, is added, the
//! ones that save the most for their time first, until the rank fits. A stage recomputes its first layers,
//! because its input is kept in any case; so the layers of each stage are added in their order. If a request
//! does not allow parts of stages, whole stages are added.

use crate::ids::{Rank, StageIndex};
use crate::placement::Placement;
use crate::plan::layers::{Layers, PartCost};
use crate::plan::numbers::Numbers;
use crate::plan::order::{Cell, Kind, Order};
use crate::plan::peaks::{peak_of_rank, peaks};
use crate::plan::rank_memory::RankMemory;
use crate::plan::stage_load::{StageLoad, besides_microbatches, stage_load, stage_loads};
use crate::recompute::{LayerPart, LayerParts, StageRecompute};
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
            chosen(layers as usize, count, LayerParts::NONE)
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

/// Returns the choice of the first `layers` of the `count` layers of a stage, and of parts of all its layers.
pub(super) fn chosen(layers: usize, count: usize, parts: LayerParts) -> Option<StageRecompute> {
    let first = StageRecompute::first(layers as u32);
    let first = first.map(|choice| StageRecompute { parts, ..choice.within(count) });
    first.or_else(|| StageRecompute::of_parts(parts))
}

/// Often draws a change of the parts that a stage recomputes: one more or one less of `all`, the parts that its
/// layers have. Nothing is drawn if they have none.
pub(super) fn drawn_parts(all: LayerParts, now: LayerParts, numbers: &mut Numbers) -> Option<LayerParts> {
    let all: Vec<LayerPart> = all.iter().collect();
    if all.is_empty() || numbers.below(3) > 0 {
        return None;
    }
    let part = all[numbers.below(all.len())];
    Some(if now.contains(part) { now.difference(part.into()) } else { now.with(part) })
}

/// Returns a choice with which `order` fits into the memory: on each rank that lacks memory, the stages with
/// the largest saving recompute, one after another. If nothing helps, all stages of the rank do.
pub(super) fn stages_to_fit(
    layers: &Layers,
    starts: &[usize],
    order: &Order,
    memory: &RankMemory,
) -> Vec<Option<StageRecompute>> {
    let mut choice = vec![false; starts.len() - 1];
    loop {
        let loads = stage_loads(layers, &order.placement, starts, &whole_stages(&choice));
        let peaks = peaks(order, &loads, layers.sharding);
        let mut changed = false;
        for (rank, _) in
            order.placement.all_ranks().zip(peaks).filter(|&(rank, peak)| peak > memory.of_rank(rank.index()))
        {
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

/// Returns the choice of the fewest layers with which `order` fits into the memory. Of the microbatches in
/// flight, each stage keeps the activations of as many as still fit. A rank that never fits recomputes all
/// layers.
pub(super) fn layers_to_fit(
    layers: &Layers,
    starts: &[usize],
    order: &Order,
    memory: &RankMemory,
) -> Vec<Option<StageRecompute>> {
    let mut fitting = Fitting::of(layers, &order.placement, starts);
    for rank in order.placement.all_ranks() {
        let own = order.placement.stages_of(rank);
        let in_flight = |stage: StageIndex| most_in_flight(&order.rows[rank.index()], stage);
        let peak = |loads: &[StageLoad]| peak_of_rank(order, loads, layers.sharding, rank.index());
        let bytes = memory.of_rank(rank.index());
        let fits = |loads: &[StageLoad]| peak(loads) <= bytes;
        fitting.fit(own, in_flight, fits);
        fitting.keep_most(own, in_flight, fits);
    }
    fitting.choice
}

/// Returns the choice of the fewest layers with which each rank can hold `wanted` microbatches of each of its
/// stages at once. A rank that never can recomputes all layers.
pub(super) fn layers_to_hold(
    layers: &Layers,
    starts: &[usize],
    placement: &Placement,
    memory: &RankMemory,
    wanted: impl Fn(usize) -> u64,
) -> Vec<Option<StageRecompute>> {
    let mut fitting = Fitting::of(layers, placement, starts);
    for rank in placement.all_ranks() {
        let own = placement.stages_of(rank);
        let (wanted, bytes) = (wanted(rank.index()), memory.of_rank(rank.index()));
        let holds = |loads: &[StageLoad]| held_with(layers, loads, own, wanted) <= bytes;
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
    memory: &RankMemory,
    wanted: impl Fn(usize) -> u64,
) -> Vec<Option<StageRecompute>> {
    let lacks = |rank: Rank| {
        let own = placement.stages_of(rank).iter().map(|stage| &loads[stage.index()]);
        let kept = own.clone().map(|load| load.kept).fold(0, u64::saturating_add);
        let fixed = StageLoad::fixed(own, layers.sharding);
        fixed.saturating_add(kept.saturating_mul(wanted(rank.index()))) > memory.of_rank(rank.index())
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

/// An addition to a choice: the next layer of a stage, or a part of all its layers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Added {
    Layer(StageIndex),
    Part(StageIndex, LayerPart),
}

/// A choice in the making, rank by rank.
struct Fitting<'a> {
    layers: &'a Layers,
    placement: &'a Placement,
    starts: &'a [usize],
    choice: Vec<Option<StageRecompute>>,
    /// The loads at the choice.
    loads: Vec<StageLoad>,
}

impl<'a> Fitting<'a> {
    /// Begins with no recomputation.
    fn of(layers: &'a Layers, placement: &'a Placement, starts: &'a [usize]) -> Self {
        let choice = vec![None; starts.len() - 1];
        Self { layers, placement, starts, loads: stage_loads(layers, placement, starts, &choice), choice }
    }

    /// Adds layers, and parts of layers, of the stages of a rank until the rank fits, and at most all.
    /// `in_flight` returns the microbatches that a stage holds at once.
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
        // More takes less memory, except for small differences: bisection finds a choice that fits, if all
        // layers do.
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

    /// Lets the stages of a rank that fits keep the activations of as many microbatches in flight as fit, the
    /// stages with the longest second forwards first.
    fn keep_most(
        &mut self,
        own: &[StageIndex],
        in_flight: impl Fn(StageIndex) -> u64,
        fits: impl Fn(&[StageLoad]) -> bool,
    ) {
        if !fits(&self.loads) {
            return;
        }
        let mut own = own.to_vec();
        let again = |stage: &StageIndex| self.loads[stage.index()].again_takes();
        own.sort_by(|one, other| again(other).total_cmp(&again(one)));
        for stage in own.iter().map(|stage| stage.index()) {
            let Some(choice) = self.loads[stage].recompute else { continue };
            let (mut fewest, mut too_many) = (0, in_flight(StageIndex::new(stage as u32)) as u32);
            while too_many - fewest > 1 {
                let middle = fewest.midpoint(too_many);
                self.set_keep(stage, choice, middle);
                if fits(&self.loads) {
                    fewest = middle;
                } else {
                    too_many = middle;
                }
            }
            self.set_keep(stage, choice, fewest);
        }
    }

    /// Lets a stage keep this number of microbatches in flight.
    fn set_keep(&mut self, stage: usize, choice: StageRecompute, keep: u32) {
        let choice = StageRecompute { keep, ..choice };
        self.choice[stage] = Some(choice);
        self.loads[stage].recompute = Some(choice);
    }

    /// Returns what is added, in this order.
    fn order_of_layers(&self, own: &[StageIndex], in_flight: impl Fn(StageIndex) -> u64) -> Vec<Added> {
        // A stage that runs forward only keeps nothing.
        let keeps = |stage: &&StageIndex| self.loads[stage.index()].computes != StageBackward::None;
        let own = own.iter().filter(keeps).copied();
        let saving = |held: f64, bytes: u64, takes: f64| held * bytes as f64 / takes.max(f64::MIN_POSITIVE);
        let mut next: Vec<(StageIndex, usize, f64)> =
            own.map(|stage| (stage, self.starts[stage.index()], in_flight(stage) as f64)).collect();
        let mut parts: Vec<(Added, f64)> = Vec::new();
        for &(stage, first, held) in &next {
            for part in LayerPart::ALL {
                let range = first..self.starts[stage.index() + 1];
                let costs = self.layers.list[range].iter().map(|layer| layer.cost_of(part.into()));
                let cost = costs.fold(PartCost::default(), PartCost::plus);
                if cost.bytes > 0 {
                    parts.push((Added::Part(stage, part), saving(held, cost.bytes, cost.takes)));
                }
            }
        }
        // The most saving part comes last.
        parts.sort_by(|one, other| one.1.total_cmp(&other.1));
        let mut added = Vec::new();
        loop {
            let left = next.iter_mut().filter(|(stage, layer, _)| *layer < self.starts[stage.index() + 1]);
            let saved = |layer: usize, held: f64| {
                let layer = &self.layers.list[layer];
                saving(held, layer.activation, layer.recompute)
            };
            let best = left.max_by(|one, other| saved(one.1, one.2).total_cmp(&saved(other.1, other.2)));
            match (best, parts.last()) {
                (None, None) => return added,
                (Some(best), part) if part.is_none_or(|part| saved(best.1, best.2) >= part.1) => {
                    best.1 += 1;
                    added.push(Added::Layer(best.0));
                }
                _ => added.extend(parts.pop().map(|(part, _)| part)),
            }
        }
    }

    /// Sets the choice of the stages of a rank: each recomputes as many layers as it is named, and the parts
    /// that are named with it.
    fn set(&mut self, own: &[StageIndex], added: &[Added]) {
        for &stage in own {
            let at = stage.index();
            let range = self.starts[at]..self.starts[at + 1];
            let count = added.iter().filter(|&&other| other == Added::Layer(stage)).count();
            let is_added = |&part: &LayerPart| added.contains(&Added::Part(stage, part));
            let parts = LayerPart::ALL.into_iter().filter(is_added).collect();
            self.choice[at] = chosen(count, range.len(), parts);
            self.loads[at] =
                stage_load(self.layers.on(self.placement.rank_of(stage).index()), range, self.choice[at]);
        }
    }
}
