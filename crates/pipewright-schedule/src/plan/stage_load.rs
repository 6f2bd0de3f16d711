//! The times and sizes of a stage, from the layers in it.
//!
//! A stage that recomputes keeps its input instead of the activations of the layers that it computes again.
//! Before `I` (or `B`) it computes their forward once more, and their activations exist until the end of `I`.
//! A forward that its own backward follows at once keeps its activations and is not computed again, and
//! neither are the forwards that the stage keeps ([`mod@crate::recompute`]). Parts of layers that are
//! computed again make `I` and `B` longer and exist only in them. Each byte of parameters needs a byte of
//! gradients, from the first weight gradient of the step, and, always, the optimizer's state for it. Replicas
//! may hold parameters and optimizer state together ([`crate::sharding`]). A stage also holds what does not
//! depend on its layers, such as tables of positions. A stage without trained parameters has no `W`, and one
//! before all trained layers runs forward only ([`crate::trained`]).

use std::ops::Range;

use crate::costs::{Costs, Link, RecomputeSizes, StageCosts, StageExchanges, StageSizes};
use crate::ids::{Rank, StageIndex};
use crate::placement::Placement;
use crate::plan::layers::{Layer, Layers};
use crate::profile::LinkProfile;
use crate::recompute::{LayerParts, Recompute, StageRecompute};
use crate::sharding::{Sharding, StateBytes};
use crate::trained::StageBackward;

/// The times and sizes of a stage for one microbatch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct StageLoad {
    /// The gradients that its backward computes.
    pub(super) computes: StageBackward,
    /// The times of `F` and `I`, without exchanges. `I` computes the parts again.
    pub(super) forward: f64,
    pub(super) input: f64,
    /// The time that `W` adds to `I` in `B`.
    pub(super) weight: f64,
    /// The time that `W` takes in addition if it is apart from its `I`.
    pub(super) apart: f64,
    /// The time to compute again what the stage recomputes of a forward, without exchanges; 0 if it does not
    /// recompute.
    pub(super) again: f64,
    /// The part that it recomputes, at most the layers that it has; `None` if it does not recompute.
    pub(super) recompute: Option<StageRecompute>,
    /// The parts that it computes again, of those that its layers have.
    pub(super) parts: LayerParts,
    /// The exchanges of tokens in its actions.
    pub(super) exchanges: StageExchanges,
    pub(super) optimizer: f64,
    /// The time to sum the gradients over the replicas.
    pub(super) reduce: f64,
    pub(super) output: u64,
    /// The bytes that a forward keeps until `I`, if it is recomputed, as far as its stage does so.
    pub(super) kept: u64,
    /// The bytes that recomputation adds during `I`; 0 in a stage that does not recompute.
    pub(super) rebuilt: u64,
    /// The bytes of the parts that `I` computes again.
    pub(super) remade: u64,
    /// The bytes that `I` keeps until `W`.
    pub(super) stash: u64,
    /// The part of `kept` and `stash` that the stage before it holds too, if that is on the same rank.
    pub(super) shared: u64,
    pub(super) gradient: u64,
    /// Parameters and optimizer state of all replicas that hold them together.
    pub(super) state: StateBytes,
    /// The bytes of trained parameters and optimizer state that the rank keeps in the update, so that it can
    /// undo it.
    pub(super) undo: u64,
    /// The other memory that the stage always holds.
    pub(super) base: u64,
    /// The memory that its rank always holds besides its stages.
    pub(super) of_rank: u64,
    /// The memory that is held only while an action runs: by the operations of a layer, and the messages of
    /// the action.
    pub(super) temporary: u64,
    /// The part of the parameters in `state` that may stay in a file.
    pub(super) streamed: u64,
    /// The bytes that are read for it.
    pub(super) read: u64,
    /// The most bytes of a matrix that is read whole for a part of it.
    pub(super) read_room: u64,
    /// The part of `forward` in which tensor-parallel ranks add their results.
    pub(super) sums: f64,
    /// The same part of `again`.
    pub(super) sums_again: f64,
    /// The same part of `input`.
    pub(super) input_sums: f64,
    /// The time to sum the gradients over the replicas, with the rank's own work for it.
    pub(super) replica_sums: f64,
}

impl StageLoad {
    /// Adds the times and sizes of the next layer, except those of its second forward. Tensors that it shares
    /// with the layer before it count once if both are in the stage.
    fn add(&mut self, layer: &Layer, is_first: bool) {
        let again_in_backward = layer.cost_of(self.parts);
        let shared = if is_first { 0 } else { layer.shared };
        let not_kept = shared.saturating_add(again_in_backward.bytes);
        self.forward += layer.forward;
        self.input += layer.input + again_in_backward.takes;
        self.weight += layer.weight;
        self.apart += layer.apart;
        self.optimizer += layer.optimizer;
        self.exchanges.forward = self.exchanges.forward.plus(layer.exchanges);
        self.exchanges.backward = self.exchanges.backward.plus(layer.input_exchanges);
        self.kept = self.kept.saturating_add(layer.activation.saturating_sub(not_kept));
        self.remade = self.remade.saturating_add(again_in_backward.bytes);
        self.stash = self.stash.saturating_add(layer.stash.saturating_sub(shared));
        self.gradient = self.gradient.saturating_add(layer.gradient);
        self.temporary = self.temporary.max(layer.temporary);
        self.streamed = self.streamed.saturating_add(layer.streamed);
        self.read = self.read.saturating_add(layer.read);
        self.read_room = self.read_room.max(layer.read_room);
        self.sums += layer.sums;
        self.input_sums += layer.input_sums;
    }

    /// Returns the bytes that a rank with these stages always holds.
    pub(super) fn always<'a>(loads: impl Iterator<Item = &'a Self> + Clone, sharding: Sharding) -> u64 {
        let of_rank = loads.clone().map(|load| load.of_rank).max().unwrap_or(0);
        let base = loads.clone().map(|load| load.base).fold(of_rank, u64::saturating_add);
        sharding.held(loads.map(|load| load.state)).total().saturating_add(base)
    }

    /// Returns the bytes of parameters, gradients and optimizer state of a rank with these stages.
    pub(super) fn fixed<'a>(loads: impl Iterator<Item = &'a Self> + Clone, sharding: Sharding) -> u64 {
        let gradients = loads.clone().map(|load| load.gradient).fold(0, u64::saturating_add);
        sharding.held(loads.map(|load| load.state)).total().saturating_add(gradients)
    }

    /// Returns the time of a `W` that is apart from its `I`.
    pub(super) fn weight_apart(&self) -> f64 {
        self.weight + self.apart
    }

    /// Returns the time of `F` with its exchanges.
    pub(super) fn forward_takes(&self) -> f64 {
        self.forward + self.exchanges.forward.seconds()
    }

    /// Returns the time of `I` with its exchanges.
    pub(super) fn input_takes(&self) -> f64 {
        self.input + self.exchanges.backward.seconds()
    }

    /// Returns the time of `B` with its exchanges.
    pub(super) fn backward_takes(&self) -> f64 {
        self.backward() + self.exchanges.backward.seconds()
    }

    /// Returns the time of a second forward with its exchanges; 0 if the stage does not recompute.
    pub(super) fn again_takes(&self) -> f64 {
        if self.recompute.is_some() { self.again + self.exchanges.again().seconds() } else { 0.0 }
    }

    /// Returns the time of `B` without exchanges.
    pub(super) fn backward(&self) -> f64 {
        self.input + self.weight
    }

    /// Returns the bytes by which an input backward may exceed what its forward keeps.
    pub(super) fn growth(&self) -> u64 {
        self.rebuilt.saturating_add(self.remade).max(self.stash.saturating_sub(self.kept))
    }

    /// Returns what the stage recomputes; `None` for nothing.
    pub(super) fn choice(&self) -> Option<StageRecompute> {
        let second_forwards = self.recompute.map(|choice| StageRecompute { parts: self.parts, ..choice });
        second_forwards.or_else(|| StageRecompute::of_parts(self.parts))
    }

    /// Returns what a forward keeps that is not computed again.
    pub(super) fn activation(&self) -> u64 {
        self.kept.saturating_add(self.rebuilt)
    }
}

/// Returns what a stage of a rank holds in addition to the stage before it: tensors that both keep count
/// once.
pub(super) fn beside(stage: StageIndex, own: &[StageIndex], loads: &[StageLoad]) -> StageLoad {
    let mut load = loads[stage.index()];
    if own.iter().any(|other| other.index() + 1 == stage.index()) {
        load.kept = load.kept.saturating_sub(load.shared);
        load.stash = load.stash.saturating_sub(load.shared);
    }
    load
}

/// Returns the bytes of tensors that wait between two neighbouring stages of a rank, where a V turns.
pub(super) fn waiting(own: &[StageIndex], loads: &[StageLoad]) -> u64 {
    let turns = own.windows(2).filter(|pair| pair[0].index() + 1 == pair[1].index());
    turns.map(|pair| loads[pair[0].index()].output).fold(0, u64::saturating_add)
}

/// Returns the bytes that a rank holds during the whole step, whatever its stages recompute.
pub(super) fn held_throughout(own: &[StageIndex], loads: &[StageLoad], sharding: Sharding) -> u64 {
    let own_loads = own.iter().map(|stage| &loads[stage.index()]);
    StageLoad::always(own_loads, sharding).saturating_add(waiting(own, loads))
}

/// Returns the most bytes that a rank holds besides the activations of its microbatches: during the whole
/// step, as gradients, and while an action runs.
pub(super) fn besides_microbatches(own: &[StageIndex], loads: &[StageLoad], sharding: Sharding) -> u64 {
    let own_loads = own.iter().map(|stage| &loads[stage.index()]);
    let gradients = own_loads.clone().map(|load| load.gradient).fold(0, u64::saturating_add);
    let temporary = own_loads.map(|load| load.temporary).max().unwrap_or(0);
    held_throughout(own, loads, sharding).saturating_add(gradients).saturating_add(temporary)
}

/// Returns the bytes that a rank holds after the last action of a step, with what can undo its update.
pub(super) fn held_in_update(own: &[StageIndex], loads: &[StageLoad], sharding: Sharding) -> u64 {
    let added = own.iter().map(|stage| &loads[stage.index()]).flat_map(|load| [load.gradient, load.undo]);
    added.fold(held_throughout(own, loads, sharding), u64::saturating_add)
}

/// Returns the loads of all stages. `starts` has the first layer of each stage and the number of layers at
/// the end; `recompute` tells for each stage what it recomputes.
pub(super) fn stage_loads(
    layers: &Layers,
    placement: &Placement,
    starts: &[usize],
    recompute: &[Option<StageRecompute>],
) -> Vec<StageLoad> {
    let stages = placement.all_stages().zip(starts.windows(2)).zip(recompute);
    let load = |((stage, range), &recompute): ((StageIndex, &[usize]), _)| {
        stage_load(layers.on(placement.rank_of(stage).index()), range[0]..range[1], recompute)
    };
    stages.map(load).collect()
}

/// Returns the load of a stage with a range of layers, which take the times on the rank of the stage.
pub(super) fn stage_load(
    layers: &Layers,
    Range { start, end }: Range<usize>,
    choice: Option<StageRecompute>,
) -> StageLoad {
    let computes = layers.backward_of(start..end);
    // A stage that runs forward only computes nothing again.
    let choice = choice.filter(|_| computes != StageBackward::None);
    // The search moves layers to other stages without regard to what these recompute.
    let parts = match choice {
        Some(choice) if !choice.parts.is_empty() => choice.parts.intersection(layers.parts_of(start..end)),
        _ => LayerParts::NONE,
    };
    let recompute = choice.filter(|choice| choice.has_second_forwards());
    let recompute = recompute.map(|choice| choice.within(end - start));
    let again = start..start + recompute.map_or(0, |choice| choice.layers_of(end - start));
    let mut load = StageLoad {
        computes,
        recompute,
        parts,
        output: layers.list[end - 1].output,
        shared: layers.list[start].shared,
        base: layers.stage_bytes,
        of_rank: layers.rank_bytes,
        ..StageLoad::default()
    };
    // The activations of the layers that are computed again.
    let mut rebuilt = 0u64;
    for (position, layer) in layers.list[start..end].iter().enumerate() {
        load.add(layer, position == 0);
        if again.contains(&(start + position)) {
            rebuilt = load.kept;
            load.again += layer.recompute;
            let exchanges = load.exchanges.recompute.unwrap_or_default();
            load.exchanges.recompute = Some(exchanges.plus(layer.exchanges));
            load.sums_again += layer.sums;
        }
    }
    load.state = Layers::state_of(&layers.list[start..end]);
    if layers.post_validation {
        // The gradients are as large as the parameters that are trained.
        let updated = load.gradient.saturating_add(load.state.optimizer);
        load.undo = updated.div_ceil(u64::from(layers.sharding.shards.max(1)));
    }
    if recompute.is_some() {
        // The input of the stage is part of its activations. The next layer keeps what it shares.
        let input = start.checked_sub(1).map_or(0, |before| layers.list[before].output);
        let shared = if again.end < end { layers.list[again.end].shared } else { 0 };
        load.rebuilt = rebuilt.saturating_sub(input.saturating_add(shared));
        load.kept -= load.rebuilt;
    }
    if end < layers.count() {
        // A forward holds its output until that is sent, and a backward the gradient of it that has arrived.
        load.temporary = load.temporary.saturating_add(load.output);
    }
    if recompute.is_some() && again.end < layers.count() {
        // The layers that are computed again return their output once more.
        load.temporary = load.temporary.saturating_add(layers.list[again.end - 1].output);
    }
    if layers.network.mesh.data > 1 && computes == StageBackward::Whole {
        load.reduce = layers.network.replica_sum(load.gradient);
        // The copies and additions are work of the rank itself, which is done with its program by then.
        let work = layers.network.replica_work(load.gradient);
        load.optimizer += work;
        load.replica_sums = load.reduce + work;
    }
    load
}

/// Returns the loads as the costs of the engine.
pub(super) fn engine_costs(layers: &Layers, loads: &[StageLoad]) -> Costs {
    let stages = loads.iter().map(|load| StageCosts {
        reduce_grad: load.reduce,
        recompute: load.recompute.map(|_| load.again),
        backward: load.backward(),
        exchanges: load.exchanges,
        ..StageCosts::new(load.forward, load.input, load.weight_apart())
    });
    // A stage that is recomputed keeps the output of the stage before it, unless that is the batch.
    let inputs = std::iter::once(0).chain(loads.iter().map(|load| load.output));
    let sizes = loads.iter().zip(inputs).map(|(load, input)| StageSizes {
        recompute: load.recompute.map(|_| RecomputeSizes { kept: load.kept, recomputed: load.rebuilt }),
        output: load.output,
        activation: load.activation(),
        stash: load.stash,
        gradient: load.gradient,
        parts: load.remade,
        offload: if load.recompute.is_some() { input } else { 0 },
        ..StageSizes::default()
    });
    let network = &layers.network;
    let engine_link = |link: LinkProfile| Link { latency: link.latency_s, bandwidth: link.bytes_per_s };
    let others = network
        .other_pairs()
        .into_iter()
        .map(|(from, to)| ((Rank::new(from), Rank::new(to)), engine_link(network.link(from, to))));
    let recompute: Vec<Option<StageRecompute>> = loads.iter().map(StageLoad::choice).collect();
    Costs {
        stages: stages.collect(),
        sizes: sizes.collect(),
        link: engine_link(network.usual_link()),
        links: others.collect(),
        recompute: Recompute::of_stages(&recompute),
        offload: Link {
            latency: 0.0,
            bandwidth: network.usual_link().offload_bytes_per_s.unwrap_or(f64::INFINITY),
        },
        ..Costs::default()
    }
}
