//! The layers of a profile, scaled to the microbatches and the mesh of a plan, with sums over the layers
//! before each one.
//!
//! **Tensor parallelism.** `t` tensor-parallel ranks each have a share of `1 / t` of the computations, the
//! parameters and the activations of a layer. Only the inputs of its parts stay whole: one for each sum over
//! these ranks, of the size of the layer's input. The sums take place in `F`, in `I`, and in a forward that
//! is computed again. Each rank normalises whole rows. This model is assumed, not measured.
//!
//! **Frozen layers.** A layer without trained parameters has no `W`. The layers before the first trained one
//! have no `I` either and keep nothing, in whatever stage they are.
//!
//! **Exchanges.** The time in which tokens travel to their experts is apart from the computation, because an
//! overlap may hide it. The sums over layers, from which the bounds are made, do not have it.

use std::ops::Range;

use crate::costs::Exchanges;
use crate::plan::head_parts::shared_bytes;
use crate::plan::network::Network;
use crate::plan::request::TrainingState;
use crate::profile::{LayerProfile, Profile, RankProfile, TENSOR_SUMS};
use crate::recompute::{LayerPart, LayerParts};
use crate::sharding::{Sharding, StateBytes};
use crate::trained::StageBackward;

/// The costs of one layer for one microbatch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layer {
    pub(super) forward: f64,
    pub(super) input: f64,
    /// The time that `W` adds to `I` in `B`.
    pub(super) weight: f64,
    /// The time that `W` takes in addition if it is apart from its `I`.
    pub(super) apart: f64,
    pub(super) recompute: f64,
    /// The exchanges of tokens in `F`, and in a forward that is computed again.
    pub(super) exchanges: Exchanges,
    /// The exchanges of tokens in `I` and in `B`.
    pub(super) input_exchanges: Exchanges,
    pub(super) optimizer: f64,
    pub(super) output: u64,
    /// The gradients of the trained parameters.
    pub(super) gradient: u64,
    /// Parameters and optimizer state.
    pub(super) state: StateBytes,
    pub(super) activation: u64,
    pub(super) stash: u64,
    /// The bytes that it keeps in `activation` and `stash` that the layer before it keeps too, if both are in
    /// one stage.
    pub(super) shared: u64,
    pub(super) temporary: u64,
    /// The part of the parameters that may stay in a file.
    pub(super) streamed: u64,
    /// The bytes that a rank reads for it.
    pub(super) read: u64,
    /// The bytes of the matrices that tensor-parallel ranks read whole, and of the largest one.
    read_whole: [u64; 2],
    /// The most bytes of a matrix that a rank reads whole for a part of it.
    pub(super) read_room: u64,
    /// The parts that a backward may compute again, in the order of [`LayerPart::ALL`].
    parts: [PartCost; LayerPart::ALL.len()],
    /// The part of `forward`, and of `recompute`, in which tensor-parallel ranks add their results.
    pub(super) sums: f64,
    /// The same part of `input`.
    pub(super) input_sums: f64,
}

/// The costs of parts of a layer that a backward computes again.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PartCost {
    /// The bytes of `activation` that are not kept.
    pub(super) bytes: u64,
    /// The time by which the backward takes longer.
    pub(super) takes: f64,
}

impl Layer {
    /// Returns the costs of some parts together.
    pub(super) fn cost_of(&self, parts: LayerParts) -> PartCost {
        parts.iter().fold(PartCost::default(), |sum, part| sum.plus(self.parts[part as usize]))
    }
}

impl PartCost {
    /// Returns the sum of the costs of two parts.
    pub(super) fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_add(other.bytes), takes: self.takes + other.takes }
    }
}

/// All layers of a model, for one size of microbatch.
#[derive(Debug, Clone)]
pub(super) struct Layers {
    pub(super) list: Vec<Layer>,
    pub(super) network: Network,
    pub(super) sharding: Sharding,
    /// See [`TrainingState::post_validation`].
    pub(super) post_validation: bool,
    /// The memory that a stage always holds besides parameters and optimizer state.
    pub(super) stage_bytes: u64,
    /// The memory that a rank always holds besides its stages.
    pub(super) rank_bytes: u64,
    /// Whether tokens travel to their experts in some layer, so that the halves of overlaps run together.
    pub(super) has_exchanges: bool,
    /// The first layer with trained parameters.
    pub(super) first_trained: usize,
    /// For each layer, whether it has trained parameters.
    trained: Vec<bool>,
    forward: Vec<f64>,
    input: Vec<f64>,
    work: Vec<f64>,
    /// The same layers at each speed that ranks have; empty if the ranks are equal.
    speeds: Vec<Layers>,
    /// For each rank, the index of its speed.
    speed_of: Vec<usize>,
}

impl Layers {
    /// Scales `profile` to microbatches of `rows` rows and to the tensor-parallel ranks of `network`. Times
    /// and sizes grow with the rows, except for the optimizer and the parameters.
    pub(super) fn of(profile: &Profile, rows: u32, network: Network, state: TrainingState) -> Self {
        let scale = f64::from(rows) / f64::from(profile.rows);
        let bytes = |bytes: u64| {
            let scaled = u128::from(bytes) * u128::from(rows) / u128::from(profile.rows);
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        let trained: Vec<bool> = profile.each_layer().map(LayerProfile::is_trained).collect();
        let first_trained = trained.iter().position(|&is_trained| is_trained).unwrap_or(0);
        let layer = |(layer, shared): (&LayerProfile, u64)| Layer {
            forward: layer.forward_s * scale,
            input: layer.input_backward_s * scale,
            weight: (layer.whole_backward_s() - layer.input_backward_s) * scale,
            apart: (layer.input_backward_s + layer.weight_backward_s - layer.whole_backward_s()).max(0.0)
                * scale,
            recompute: layer.recompute_s.unwrap_or(layer.forward_s) * scale,
            exchanges: exchanges(layer.exchange_s * scale),
            input_exchanges: exchanges(layer.exchange_s * scale),
            optimizer: layer.optimizer_s,
            output: bytes(layer.output_bytes),
            gradient: layer.gradient_bytes(),
            state: StateBytes {
                parameters: layer.held_bytes.unwrap_or(layer.parameter_bytes),
                copy: layer.copy_bytes.unwrap_or_else(|| part_of(layer.parameter_bytes, state.copy)),
                optimizer: layer
                    .optimizer_bytes
                    .unwrap_or_else(|| part_of(layer.gradient_bytes(), state.optimizer)),
            },
            activation: bytes(layer.activation_bytes),
            stash: bytes(layer.stash_bytes()),
            shared: bytes(shared),
            temporary: bytes(layer.temporary_bytes),
            streamed: layer.streamed_bytes,
            read: layer.streamed_bytes,
            read_whole: layer.read_whole_bytes,
            read_room: 0,
            parts: LayerPart::ALL.map(|part| {
                let costs = layer.part(part);
                PartCost { bytes: bytes(costs.bytes), takes: costs.recompute_s * scale }
            }),
            sums: 0.0,
            input_sums: 0.0,
        };
        let mut list: Vec<Layer> = profile.each_layer().zip(shared_bytes(profile)).map(layer).collect();
        for (index, layer) in list.iter_mut().enumerate().filter(|&(index, _)| !trained[index]) {
            freeze(layer, index < first_trained);
        }
        if network.mesh.tensor > 1 {
            let counts = profile.each_layer().map(|layer| layer.tensor_sums.unwrap_or(TENSOR_SUMS));
            // The input of the first layer is not known. Its output has the size of hidden states, as other
            // inputs have.
            let mut input = list.first().map_or(0, |layer| layer.output);
            for (index, (layer, sums)) in list.iter_mut().zip(counts).enumerate() {
                let output = layer.output;
                divide(layer, input, sums, &network);
                if index < first_trained {
                    freeze(layer, true);
                }
                input = output;
            }
        }
        let forward = sums(&list, |layer| layer.forward);
        let input = sums(&list, |layer| layer.input);
        let work = sums(&list, |layer| layer.forward + layer.input + layer.weight);
        let sharding =
            Sharding { shards: state.groups.shards_that_divide(network.mesh.data), window: state.window };
        let (stage_bytes, rank_bytes) = (profile.stage_bytes, profile.rank_bytes);
        Self {
            list,
            network,
            sharding,
            post_validation: state.post_validation,
            stage_bytes,
            rank_bytes,
            has_exchanges: profile.has_exchanges(),
            first_trained,
            trained,
            forward,
            input,
            work,
            speeds: Vec::new(),
            speed_of: Vec::new(),
        }
    }

    /// Adds the layers at the speeds of the ranks of `profile`.
    pub(super) fn with_speeds(mut self, profile: &Profile, rows: u32, state: TrainingState) -> Self {
        let mut known: Vec<&RankProfile> = Vec::new();
        for rank in &profile.ranks {
            let is_alike = |other: &&RankProfile| other.has_times_of(rank);
            let index = known.iter().position(is_alike).unwrap_or_else(|| {
                known.push(rank);
                self.speeds.push(Self::of(&profile.at_speed_of(rank), rows, self.network.clone(), state));
                known.len() - 1
            });
            self.speed_of.push(index);
        }
        self
    }

    /// Returns whether the ranks differ in their speed or their links.
    pub(super) fn is_unlike(&self) -> bool {
        !self.speed_of.is_empty() || self.network.has_own_links()
    }

    /// Returns layers that take no longer than these on any rank, and that each rank computes at one speed, whatever their
    /// kind. `speeds` has it for each rank. A layer takes at speed 1 what it takes on the rank with the smallest product of
    /// its time and its speed.
    pub(super) fn at_one_speed_each(&self, speeds: &[f64]) -> Self {
        let ranks = || (0..).zip(speeds).map(|(rank, &speed)| (speed, &self.on(rank).list));
        let least = |at: usize, takes: fn(&Layer) -> f64| {
            ranks().map(|(speed, list)| speed * takes(&list[at])).fold(f64::INFINITY, f64::min)
        };
        let list: Vec<Layer> = (0..self.count())
            .map(|at| Layer {
                forward: least(at, |layer| layer.forward),
                input: least(at, |layer| layer.input),
                weight: least(at, |layer| layer.weight),
                ..self.list[at]
            })
            .collect();
        let at_speed = |speed: f64| {
            let timed = |layer: &Layer| Layer {
                forward: layer.forward / speed,
                input: layer.input / speed,
                weight: layer.weight / speed,
                ..*layer
            };
            self.with_list(list.iter().map(timed).collect())
        };
        let at_speeds = speeds.iter().map(|&speed| at_speed(speed)).collect();
        Self { speeds: at_speeds, speed_of: (0..speeds.len()).collect(), ..self.with_list(list) }
    }

    /// Returns these layers for equal ranks with other costs.
    fn with_list(&self, list: Vec<Layer>) -> Self {
        Self {
            forward: sums(&list, |layer| layer.forward),
            input: sums(&list, |layer| layer.input),
            work: sums(&list, |layer| layer.forward + layer.input + layer.weight),
            list,
            network: self.network.clone(),
            trained: self.trained.clone(),
            speeds: Vec::new(),
            speed_of: Vec::new(),
            ..*self
        }
    }

    /// Returns the layers with the times that they take on a rank.
    pub(super) fn on(&self, rank: usize) -> &Self {
        self.speed_of.get(rank).map_or(self, |&speed| &self.speeds[speed])
    }

    /// Returns what training needs for the parameters of some layers, without their gradients.
    pub(super) fn state_of(layers: &[Layer]) -> StateBytes {
        layers.iter().map(|layer| layer.state).fold(StateBytes::default(), StateBytes::plus)
    }

    /// Returns what the backward of a stage with these layers computes.
    pub(super) fn backward_of(&self, range: Range<usize>) -> StageBackward {
        if range.end <= self.first_trained {
            StageBackward::None
        } else if self.trained[range].contains(&true) {
            StageBackward::Whole
        } else {
            StageBackward::Inputs
        }
    }

    /// Returns the part of a rank's parameters, gradients and optimizer state that belongs to a layer. If
    /// replicas hold them together, it has the share of the gathered parameters that stages of equal size
    /// have, with `chunks` stages on the rank.
    pub(super) fn layer_bytes(&self, layer: &Layer, chunks: usize) -> u64 {
        let state = layer.state;
        let part = Sharding { window: 0, ..self.sharding }.held([state]).total();
        let gathered = match self.sharding.shards {
            ..=1 => 0,
            _ => {
                let (whole, window) = (state.parameters.saturating_add(state.copy), self.sharding.window);
                u128::from(whole) * u128::from(window).min(chunks as u128) / (chunks as u128).max(1)
            }
        };
        let gathered = u64::try_from(gathered).unwrap_or(u64::MAX);
        layer.gradient.saturating_add(part).saturating_add(gathered)
    }

    /// Returns the parts that some layer of a range may compute again to save memory.
    pub(super) fn parts_of(&self, range: Range<usize>) -> LayerParts {
        let list = &self.list[range];
        let saves = |&part: &LayerPart| list.iter().any(|layer| layer.parts[part as usize].bytes > 0);
        LayerPart::ALL.into_iter().filter(saves).collect()
    }

    /// Returns the number of layers.
    pub(super) fn count(&self) -> usize {
        self.list.len()
    }

    /// Returns the time of `F` over a range of layers.
    pub(super) fn forward(&self, range: Range<usize>) -> f64 {
        self.forward[range.end] - self.forward[range.start]
    }

    /// Returns the time of `I` over a range of layers.
    pub(super) fn input(&self, range: Range<usize>) -> f64 {
        self.input[range.end] - self.input[range.start]
    }

    /// Returns the time of `F` and `B` over a range of layers, the least that a microbatch takes.
    pub(super) fn work(&self, range: Range<usize>) -> f64 {
        self.work[range.end] - self.work[range.start]
    }

    /// Returns the size of the smallest message between any two neighbouring layers.
    pub(super) fn smallest_output(&self) -> u64 {
        let inner = &self.list[..self.count().saturating_sub(1)];
        inner.iter().map(|layer| layer.output).min().unwrap_or(0)
    }
}

/// Removes what a layer without trained parameters does not compute and keep. With `is_below`, it comes
/// before all trained layers.
fn freeze(layer: &mut Layer, is_below: bool) {
    *layer = Layer { weight: 0.0, apart: 0.0, optimizer: 0.0, stash: 0, ..*layer };
    if is_below {
        let input_exchanges = Exchanges::default();
        *layer = Layer { input: 0.0, input_exchanges, input_sums: 0.0, activation: 0, shared: 0, ..*layer };
        layer.parts = Default::default();
    }
}

/// Returns the exchanges of a layer: to the ranks of the experts and back.
fn exchanges(seconds: f64) -> Exchanges {
    Exchanges::new(2, seconds)
}

/// Divides a layer among the tensor-parallel ranks. `input` is the size of its input.
fn divide(layer: &mut Layer, input: u64, sums: u32, network: &Network) {
    let ranks = u64::from(network.mesh.tensor);
    let share = 1.0 / ranks as f64;
    layer.sums = f64::from(sums) * network.tensor_sum(input);
    layer.input_sums = layer.sums;
    layer.forward = layer.forward * share + layer.sums;
    layer.input = layer.input * share + layer.sums;
    layer.weight *= share;
    layer.apart *= share;
    layer.recompute = layer.recompute * share + layer.sums;
    layer.optimizer *= share;
    layer.gradient = layer.gradient.div_ceil(ranks);
    layer.state = layer.state.map(|bytes| bytes.div_ceil(ranks));
    let whole = u64::from(sums).saturating_mul(input);
    let divided = |bytes: u64| {
        let whole = whole.min(bytes);
        whole + (bytes - whole).div_ceil(ranks)
    };
    layer.activation = divided(layer.activation);
    layer.stash = divided(layer.stash);
    layer.temporary = layer.temporary.div_ceil(ranks);
    let [whole, largest] = layer.read_whole;
    layer.streamed = layer.streamed.div_ceil(ranks);
    layer.read = whole + layer.read.saturating_sub(whole).div_ceil(ranks);
    layer.read_room = largest;
    // Each rank normalises whole rows.
    let feed_forward = &mut layer.parts[LayerPart::FeedForward as usize];
    *feed_forward = PartCost { bytes: feed_forward.bytes / ranks, takes: feed_forward.takes * share };
    let mut left = layer.activation;
    for part in &mut layer.parts {
        part.bytes = part.bytes.min(left);
        left -= part.bytes;
    }
}

/// Returns a share of the bytes of parameters, rounded up.
fn part_of(parameters: u64, share: f64) -> u64 {
    (parameters as f64 * share).ceil() as u64
}

fn sums(layers: &[Layer], of: impl Fn(&Layer) -> f64) -> Vec<f64> {
    let mut sums = vec![0.0];
    for layer in layers {
        sums.push(sums[sums.len() - 1] + of(layer));
    }
    sums
}
