//! The figures of a profile: its layers, its links and its device, as files have them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::is_zero;
use crate::recompute::LayerPart;

/// The name of the processor in [`DeviceProfile::device`]. All ranks share its memory.
pub const PROCESSOR: &str = "flex";

/// The costs of a model on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The rows of the microbatch that the times and sizes are for.
    #[serde(default = "one")]
    pub rows: u32,
    /// The tokens of a row. Parts of a head send two numbers for each of them; `None` if these do not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u32>,
    /// The memory that a stage always holds besides parameters and optimizer state, such as tables of
    /// positions.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stage_bytes: u64,
    /// The memory that a rank always holds besides its stages, such as the workspace of matrix products.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rank_bytes: u64,
    /// The device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceProfile>,
    /// The link between any two ranks; if there are nodes, between ranks of different nodes.
    pub link: LinkProfile,
    /// The nodes of a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeProfile>,
    /// The ranks in their order, if they differ; empty if all are as the profile says.
    #[serde(default, rename = "rank", skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankProfile>,
    /// The links between two ranks that differ from `link` and `node`.
    #[serde(default, rename = "pair", skip_serializing_if = "Vec::is_empty")]
    pub pairs: Vec<PairProfile>,
    /// The layers in the order of the model.
    pub layers: Vec<LayerProfile>,
    /// The figures that were not measured but assumed, such as `link.latency_s` or `head.forward_s`: a
    /// section or the kind of a layer, and a key.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assumed: Vec<String>,
}

/// The device that a profile is for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// The name, for people.
    #[serde(default)]
    pub name: String,
    /// The memory of one rank, of as many as `ranks` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The device as a configuration of a run names it, such as `flex` or `cuda:1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The precision of the computation as a configuration of a run names it, such as `bf16`; `None` for
    /// `f32`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<String>,
    /// The number of ranks that computed at the same time while the profile was measured. They share caches
    /// and memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u32>,
    /// The threads of each rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads_per_rank: Option<u32>,
}

/// The link between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkProfile {
    /// The time from the departure of the last byte to its arrival.
    pub latency_s: f64,
    /// The bandwidth.
    pub bytes_per_s: f64,
    /// The bytes of gradients per second that a rank copies and adds for sums over replicas, besides their
    /// transfer. `None` if that takes no time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduce_bytes_per_s: Option<f64>,
    /// The bytes per second at which `OFFLOAD` and `RELOAD` move tensors of a rank. `None` if that takes no time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload_bytes_per_s: Option<f64>,
    /// The bytes per second that the ranks of a host together read from the files of a frozen base
    /// (`model.stream`). `None` if it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_s: Option<f64>,
}

/// A node of a cluster: ranks with consecutive numbers, and the link between any two of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeProfile {
    /// The number of ranks.
    pub ranks: u32,
    /// The time from the departure of the last byte to its arrival.
    pub latency_s: f64,
    /// The bandwidth.
    pub bytes_per_s: f64,
}

/// A rank whose machine differs from the one that the profile is of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankProfile {
    /// The speed relative to the times of the profile: at 0.5, a computation takes twice as long.
    #[serde(default = "one_speed", skip_serializing_if = "is_one_speed")]
    pub speed: f64,
    /// The memory of the rank; `None` for the memory of a rank of the profile's device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The threads of the rank, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// The device of the rank as a configuration of a run names it; `None` for the device of the profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The speeds of kinds of layers for which `speed` does not hold.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub speeds: BTreeMap<String, f64>,
    /// The speed of the optimizer; `None` for the speed of each layer. Files do not have it: replicas whose shares of
    /// the batch are unequal do ([`Profile::of_replicas`]).
    #[serde(skip)]
    pub optimizer_speed: Option<f64>,
}

/// The link from one rank to another one. Without an entry of its own, the other direction has the same link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairProfile {
    /// The rank that sends.
    pub from: u32,
    /// The rank that receives.
    pub to: u32,
    /// The time from the departure of the last byte to its arrival.
    pub latency_s: f64,
    /// The bandwidth.
    pub bytes_per_s: f64,
}

/// The costs of a layer, or of several equal layers in a row, for one microbatch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerProfile {
    /// The kind of layer, for people.
    pub kind: String,
    /// The number of such layers in a row.
    #[serde(default = "one")]
    pub count: u32,
    /// The time of `F`.
    pub forward_s: f64,
    /// The time of `I`.
    pub input_backward_s: f64,
    /// The time of `W`.
    pub weight_backward_s: f64,
    /// The time of `B`, the backward as a whole: from the time of `I` to the time of `I` and `W` together. `None`
    /// for that sum. It is shorter where a backward in two halves repeats work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backward_s: Option<f64>,
    /// The time to recompute the forward before a backward; `None` for the time of `F`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute_s: Option<f64>,
    /// The time in which tokens travel to the ranks of their experts and back, in `F` and in a forward that
    /// is recomputed, and again in `I` and in `B`: two exchanges each. The other times do not include it. A
    /// plan with larger microbatches scales the whole time in proportion to the rows, also the latency in it.
    /// So a step with such a plan may take less time than predicted.
    #[serde(default, skip_serializing_if = "is_no_time")]
    pub exchange_s: f64,
    /// The time of the optimizer, once per step.
    #[serde(default)]
    pub optimizer_s: f64,
    /// The size of the output, which crosses a boundary after this layer.
    pub output_bytes: u64,
    /// The size of the parameters and of adapters, without gradients and optimizer state.
    pub parameter_bytes: u64,
    /// The part of `parameter_bytes` that training changes: the adapters, or 0 for a frozen layer; `None` for
    /// all. A frozen layer has no `W`. The layers before the first trained one have no `I` either, and keep
    /// nothing for a backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_bytes: Option<u64>,
    /// The size of the tensors that the forward keeps until `I`.
    pub activation_bytes: u64,
    /// The size of the tensors that `I` keeps until `W`; `None` for half of `activation_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_activation_bytes: Option<u64>,
    /// The part of `activation_bytes` that is not kept if a backward computes normalisations again
    /// ([`LayerPart::Norms`]); 0 if none can.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub norms_bytes: u64,
    /// The time by which `I` and `B` then take longer.
    #[serde(default, skip_serializing_if = "is_no_time")]
    pub norms_s: f64,
    /// Like `norms_bytes`, for the activation of the feed-forward layer ([`LayerPart::FeedForward`]).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub feed_forward_bytes: u64,
    /// The time by which `I` and `B` then take longer.
    #[serde(default, skip_serializing_if = "is_no_time")]
    pub feed_forward_s: f64,
    /// The size of the optimizer's state; `None` for the share of the trained parameters that a plan's
    /// request has. It depends on the run and is not in files.
    #[serde(skip)]
    pub optimizer_bytes: Option<u64>,
    /// The memory for the parameters, if that is not `parameter_bytes`: the base of adapters is held in the
    /// precision in which it computes. It depends on the run and is not in files.
    #[serde(skip)]
    pub held_bytes: Option<u64>,
    /// The memory for the matrices of a frozen base that may stay in a file, in the form that they have there; 0 if none may.
    /// It depends on the run and is not in files.
    #[serde(skip)]
    pub streamed_bytes: u64,
    /// The part of `streamed_bytes` that each tensor-parallel rank reads whole, because it has some of the inputs of these
    /// matrices, and the largest of them, which is in memory until the rank's part is made.
    #[serde(skip)]
    pub read_whole_bytes: [u64; 2],
    /// The memory for the other parameters, if those matrices stay in a file.
    #[serde(skip)]
    pub unstreamed_bytes: u64,
    /// The size of the copy of the parameters with which a stage computes in half precision; `None` for the
    /// share of `parameter_bytes` that a plan's request has. It depends on the run and is not in files.
    #[serde(skip)]
    pub copy_bytes: Option<u64>,
    /// The most bytes that the layer's operations hold only while they run. An action needs them once, for
    /// the layer of its stage with the most.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub temporary_bytes: u64,
    /// The number of sums over tensor-parallel ranks in `F`, each of the size of the layer's input, and as
    /// many in `I`; `None` for [`TENSOR_SUMS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_sums: Option<u32>,
}

/// The costs of a part of a layer whose results a backward computes again, for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PartProfile {
    /// The bytes that are not kept: a part of [`LayerProfile::activation_bytes`].
    pub bytes: u64,
    /// The time by which `I` and `B` take longer.
    pub recompute_s: f64,
}

/// The number of sums over tensor-parallel ranks in `F` of a layer: one after attention and one after the
/// feed-forward part (Shoeybi et al., "Megatron-LM", 2019).
pub const TENSOR_SUMS: u32 = 2;

fn one() -> u32 {
    1
}

fn one_speed() -> f64 {
    1.0
}

fn is_one_speed(speed: &f64) -> bool {
    *speed == one_speed()
}

fn is_no_time(seconds: &f64) -> bool {
    *seconds == 0.0
}

impl Default for Profile {
    /// A profile for microbatches of one row, without layers.
    fn default() -> Self {
        Self {
            rows: 1,
            tokens: None,
            stage_bytes: 0,
            rank_bytes: 0,
            device: None,
            link: LinkProfile::default(),
            node: None,
            ranks: Vec::new(),
            pairs: Vec::new(),
            layers: Vec::new(),
            assumed: Vec::new(),
        }
    }
}

impl Default for LayerProfile {
    /// One layer without costs.
    fn default() -> Self {
        Self {
            kind: String::new(),
            count: 1,
            forward_s: 0.0,
            input_backward_s: 0.0,
            weight_backward_s: 0.0,
            backward_s: None,
            recompute_s: None,
            exchange_s: 0.0,
            optimizer_s: 0.0,
            output_bytes: 0,
            parameter_bytes: 0,
            trained_bytes: None,
            activation_bytes: 0,
            weight_activation_bytes: None,
            norms_bytes: 0,
            norms_s: 0.0,
            feed_forward_bytes: 0,
            feed_forward_s: 0.0,
            temporary_bytes: 0,
            tensor_sums: None,
            optimizer_bytes: None,
            held_bytes: None,
            streamed_bytes: 0,
            read_whole_bytes: [0; 2],
            unstreamed_bytes: 0,
            copy_bytes: None,
        }
    }
}

impl LinkProfile {
    /// Returns a link of this latency in seconds and bandwidth in bytes per second.
    pub fn new(latency_s: f64, bytes_per_s: f64) -> Self {
        Self { latency_s, bytes_per_s, ..Self::default() }
    }
}

impl NodeProfile {
    /// Returns the link between two ranks of the node.
    pub fn link(&self) -> LinkProfile {
        LinkProfile::new(self.latency_s, self.bytes_per_s)
    }
}

impl Default for RankProfile {
    /// A rank as the profile says.
    fn default() -> Self {
        Self {
            speed: one_speed(),
            memory_bytes: None,
            threads: None,
            device: None,
            speeds: BTreeMap::new(),
            optimizer_speed: None,
        }
    }
}

impl RankProfile {
    /// Returns the speed of a computation of layers of a kind.
    pub fn speed_of(&self, kind: &str) -> f64 {
        self.speeds.get(kind).copied().unwrap_or(self.speed)
    }

    /// Returns whether computations take as long as on another rank.
    pub fn has_times_of(&self, other: &Self) -> bool {
        (self.speed, &self.speeds, self.optimizer_speed)
            == (other.speed, &other.speeds, other.optimizer_speed)
    }

    /// Returns the speed at the kind of layers for which it is the lowest.
    pub fn least_speed(&self) -> f64 {
        self.speeds.values().copied().fold(self.speed, f64::min)
    }
}

impl PairProfile {
    /// Returns the link.
    pub fn link(&self) -> LinkProfile {
        LinkProfile::new(self.latency_s, self.bytes_per_s)
    }
}

impl LayerProfile {
    /// Returns the size of the tensors that `I` keeps until `W`.
    pub fn stash_bytes(&self) -> u64 {
        self.weight_activation_bytes.unwrap_or(self.activation_bytes / 2)
    }

    /// Returns the costs of a part that a backward computes again. It has no bytes if the layer lacks the part.
    pub fn part(&self, part: LayerPart) -> PartProfile {
        let (bytes, recompute_s) = match part {
            LayerPart::Norms => (self.norms_bytes, self.norms_s),
            LayerPart::FeedForward => (self.feed_forward_bytes, self.feed_forward_s),
        };
        PartProfile { bytes, recompute_s }
    }

    /// Sets the costs of a part.
    pub fn set_part(&mut self, part: LayerPart, PartProfile { bytes, recompute_s }: PartProfile) {
        match part {
            LayerPart::Norms => (self.norms_bytes, self.norms_s) = (bytes, recompute_s),
            LayerPart::FeedForward => (self.feed_forward_bytes, self.feed_forward_s) = (bytes, recompute_s),
        }
    }

    /// Returns whether training changes parameters of the layer.
    pub fn is_trained(&self) -> bool {
        self.trained_bytes != Some(0)
    }

    /// Returns the size of the parameters that training changes, and of their gradients.
    pub fn gradient_bytes(&self) -> u64 {
        self.trained_bytes.unwrap_or(self.parameter_bytes)
    }

    /// Returns the time of `B`.
    pub fn whole_backward_s(&self) -> f64 {
        self.backward_s.unwrap_or(self.input_backward_s + self.weight_backward_s)
    }
}

impl Profile {
    /// Returns the number of layers, with repetitions.
    pub fn layer_count(&self) -> u64 {
        self.layers.iter().map(|layer| u64::from(layer.count)).sum()
    }

    /// Returns every layer in the order of the model, with repetitions.
    pub fn each_layer(&self) -> impl Iterator<Item = &LayerProfile> {
        self.layers.iter().flat_map(|layer| std::iter::repeat_n(layer, layer.count as usize))
    }

    /// Returns whether tokens travel to their experts in some layer. Then the halves of an overlap run together
    /// ([`TrainingLowering::with_exchanges`](crate::lower::TrainingLowering::with_exchanges)).
    pub fn has_exchanges(&self) -> bool {
        self.layers.iter().any(|layer| layer.exchange_s > 0.0)
    }

    /// Returns the memory of each of `ranks` ranks in bytes, if the profile has it. A profile that was
    /// measured with another number of ranks has the share of one of those ranks. The memory of a processor's
    /// machine is divided by `ranks`.
    pub fn memory_of_rank(&self, ranks: u32) -> Option<u64> {
        let device = self.device.as_ref()?;
        let memory = device.memory_bytes?;
        let is_processor = device.device.as_deref().is_none_or(|name| name == PROCESSOR);
        match device.ranks.filter(|_| is_processor) {
            Some(measured) => Some(memory.saturating_mul(measured.into()) / u64::from(ranks.max(1))),
            None => Some(memory),
        }
    }
}
