//! A machine: the data sheet of a GPU, its links, and the constants of the cost model.
//!
//! A data sheet says what the hardware can do at most. The constants say which share of it programs reach.
//! Each has a meaning and a range, and belongs to a machine, never to a model or a run.

use serde::Deserialize;
use thiserror::Error;

use crate::quantity::{Dimension, Quantity, QuantityError};

/// A GPU with its links.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// The name.
    pub name: String,
    /// Short names.
    pub aliases: Vec<String>,
    /// Dense operations per second in bf16 and f16; `None` if they are not published.
    pub bf16: Option<f64>,
    /// Dense operations per second in FP8; `None` if the machine has no FP8.
    pub fp8: Option<f64>,
    /// Bytes of memory.
    pub memory: f64,
    /// Bytes per second of memory.
    pub memory_bandwidth: f64,
    /// Bytes per second from a GPU to the others of its node, in each direction.
    pub node_bandwidth: f64,
    /// Bytes per second from a GPU to other nodes, in each direction.
    pub network_bandwidth: f64,
    /// GPUs of a node, or of a domain of fast links.
    pub gpus_per_node: u32,
    /// Multiprocessors, among which the tiles of a product are divided.
    pub multiprocessors: u32,
    /// The switch between the GPUs of a node.
    pub node_switch: Switch,
    /// Watts of a GPU at most; `None` if they are not known.
    pub board_power: Option<f64>,
    /// Seconds of a message inside a node, in addition to its bytes.
    pub node_latency: f64,
    /// Seconds of a message between nodes, in addition to its bytes.
    pub network_latency: f64,
    /// The shares that programs reach.
    pub constants: Constants,
    /// Where the figures are published.
    pub source: String,
}

/// What connects the GPUs of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// Links between pairs of GPUs, or a bus.
    #[default]
    None,
    /// A switch that forwards messages from each GPU to each other one at the full bandwidth.
    Forwards,
    /// A switch that also adds tensors on their way.
    Reduces,
}

/// The constants of the cost model.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    /// The share of the bf16 peak that large products sustain.
    pub product: f64,
    /// The share of the FP8 peak that large products sustain, with their scaling.
    pub product_fp8: f64,
    /// The share of the bf16 peak that fused attention sustains in its forward.
    pub attention: f64,
    /// The share of the memory's bandwidth that elementwise kernels reach.
    pub memory: f64,
    /// The share of a link's bandwidth that collectives reach.
    pub link: f64,
    /// The share of a tensor group's communication that is hidden behind the product before or after it.
    pub hidden: f64,
    /// Seconds between two kernels.
    pub launch: f64,
}

/// The name and the range of a constant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConstantRange {
    /// The key in files.
    pub name: &'static str,
    /// The smallest value that is plausible.
    pub least: f64,
    /// The largest value that is plausible.
    pub most: f64,
}

impl Constants {
    /// The ranges. Products: published rates of cuBLAS on A100 and H100. Attention: FlashAttention 2 and 3
    /// (arXiv 2307.08691, 2407.08608). Memory: STREAM-like kernels reach 0.7 to 0.93. Links: bus bandwidths
    /// of nccl-tests against data sheets.
    pub const RANGES: [ConstantRange; 7] = [
        ConstantRange { name: "product", least: 0.3, most: 0.9 },
        ConstantRange { name: "product_fp8", least: 0.3, most: 0.85 },
        ConstantRange { name: "attention", least: 0.2, most: 0.75 },
        ConstantRange { name: "memory", least: 0.5, most: 0.93 },
        ConstantRange { name: "link", least: 0.5, most: 0.95 },
        ConstantRange { name: "hidden", least: 0.0, most: 0.95 },
        ConstantRange { name: "launch", least: 0.0, most: 1e-5 },
    ];

    /// The values that microbenchmarks of recent GPUs measure, for machines without published runs. No
    /// communication is hidden.
    pub const EXPECTED: Self = Self {
        product: 0.70,
        product_fp8: 0.58,
        attention: 0.58,
        memory: 0.78,
        link: 0.75,
        hidden: 0.0,
        launch: 2e-6,
    };

    /// Returns the constants in the order of [`Self::RANGES`].
    pub fn to_array(self) -> [f64; 7] {
        let Self { product, product_fp8, attention, memory, link, hidden, launch } = self;
        [product, product_fp8, attention, memory, link, hidden, launch]
    }

    /// Makes constants in the order of [`Self::RANGES`].
    pub fn from_array(values: [f64; 7]) -> Self {
        let [product, product_fp8, attention, memory, link, hidden, launch] = values;
        Self { product, product_fp8, attention, memory, link, hidden, launch }
    }

    fn check(self) -> Result<Self, MachineError> {
        let out_of_range =
            |&(value, range): &(f64, ConstantRange)| !(range.least..=range.most).contains(&value);
        match self.to_array().into_iter().zip(Self::RANGES).find(out_of_range) {
            Some((value, range)) => Err(MachineError::Constant { value: value.to_string(), range }),
            None => Ok(self),
        }
    }
}

/// The errors of a machine's description.
#[derive(Clone, PartialEq, Error)]
pub enum MachineError {
    /// A figure is not what its key measures.
    #[error(transparent)]
    Quantity(#[from] QuantityError),
    /// A constant is out of its range.
    #[error("the constant `{}` is {value}; use a value from {} to {}", .range.name, .range.least, .range.most)]
    Constant {
        /// The value, as text.
        value: String,
        /// The range.
        range: ConstantRange,
    },
    /// A count is 0.
    #[error("`{key}` is 0; use at least 1")]
    Zero {
        /// The key.
        key: &'static str,
    },
    /// A key that a machine needs is missing.
    #[error("`{key}` is missing, and no known machine has this name; add it")]
    Missing {
        /// The key.
        key: &'static str,
    },
}

pipewright_schedule::message_as_debug!(MachineError);

/// A machine as a file describes it. If a key is missing, its value is that of a known machine.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineTable {
    name: String,
    #[serde(default)]
    aliases: Vec<String>,
    bf16_tflops: Option<Quantity>,
    fp8_tflops: Option<Quantity>,
    memory_gb: Option<Quantity>,
    memory_gb_per_s: Option<Quantity>,
    node_gb_per_s: Option<Quantity>,
    network_gb_per_s: Option<Quantity>,
    gpus_per_node: Option<u32>,
    multiprocessors: Option<u32>,
    node_switch: Option<Switch>,
    board_watts: Option<Quantity>,
    node_latency_us: Option<Quantity>,
    network_latency_us: Option<Quantity>,
    constants: Option<Constants>,
    source: Option<String>,
}

/// Bytes of a gigabyte of memory as sold: data sheets call 2^30 bytes a GB.
const MEMORY_GB: f64 = 1_073_741_824.0;

impl MachineTable {
    /// Returns the machine's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes the machine. Figures that the table lacks are taken from `known`.
    ///
    /// # Errors
    /// When a figure has a wrong unit or range, or is missing and there is no known machine.
    pub fn machine(&self, known: Option<&Machine>) -> Result<Machine, MachineError> {
        let of_known = |figure: fn(&Machine) -> f64| known.map(figure);
        let constants = match self.constants {
            Some(constants) => constants.check()?,
            None => known.map_or(Constants::EXPECTED, |known| known.constants),
        };
        let node_latency = of_known(|known| known.node_latency).or(Some(NODE_LATENCY));
        let network_latency = of_known(|known| known.network_latency).or(Some(NETWORK_LATENCY));
        let multiprocessors = known.map_or(MULTIPROCESSORS, |known| known.multiprocessors);
        let gpus_per_node = known.map(|known| known.gpus_per_node);
        Ok(Machine {
            name: self.name.clone(),
            aliases: self.aliases.clone(),
            bf16: BF16.value(&self.bf16_tflops, known.and_then(|known| known.bf16))?,
            fp8: FP8.value(&self.fp8_tflops, known.and_then(|known| known.fp8))?,
            memory: MEMORY.needed(&self.memory_gb, of_known(|known| known.memory))?,
            memory_bandwidth: MEMORY_BANDWIDTH
                .needed(&self.memory_gb_per_s, of_known(|known| known.memory_bandwidth))?,
            node_bandwidth: NODE.needed(&self.node_gb_per_s, of_known(|known| known.node_bandwidth))?,
            network_bandwidth: NETWORK
                .needed(&self.network_gb_per_s, of_known(|known| known.network_bandwidth))?,
            gpus_per_node: count("gpus_per_node", self.gpus_per_node, gpus_per_node)?,
            multiprocessors: count("multiprocessors", self.multiprocessors, Some(multiprocessors))?,
            node_switch: self.node_switch.or(known.map(|known| known.node_switch)).unwrap_or_default(),
            board_power: POWER.value(&self.board_watts, known.and_then(|known| known.board_power))?,
            node_latency: NODE_TIME.needed(&self.node_latency_us, node_latency)?,
            network_latency: NETWORK_TIME.needed(&self.network_latency_us, network_latency)?,
            constants,
            source: self.source.clone().or(known.map(|known| known.source.clone())).unwrap_or_default(),
        })
    }
}

/// The latency of a message inside a node, if it is not given, in seconds.
const NODE_LATENCY: f64 = 5e-6;
/// The latency of a message between nodes, if it is not given, in seconds.
const NETWORK_LATENCY: f64 = 1e-5;
/// The multiprocessors, if they are not given: those of the H100.
const MULTIPROCESSORS: u32 = 132;

/// A key of a table with the unit of a plain number.
struct Figure {
    key: &'static str,
    dimension: Dimension,
    unit: f64,
}

const BF16: Figure = Figure { key: "bf16_tflops", dimension: Dimension::Rate, unit: 1e12 };
const FP8: Figure = Figure { key: "fp8_tflops", dimension: Dimension::Rate, unit: 1e12 };
const MEMORY: Figure = Figure { key: "memory_gb", dimension: Dimension::Size, unit: MEMORY_GB };
const MEMORY_BANDWIDTH: Figure =
    Figure { key: "memory_gb_per_s", dimension: Dimension::Bandwidth, unit: 1e9 };
const NODE: Figure = Figure { key: "node_gb_per_s", dimension: Dimension::Bandwidth, unit: 1e9 };
const NETWORK: Figure = Figure { key: "network_gb_per_s", dimension: Dimension::Bandwidth, unit: 1e9 };
const POWER: Figure = Figure { key: "board_watts", dimension: Dimension::Power, unit: 1.0 };
const NODE_TIME: Figure = Figure { key: "node_latency_us", dimension: Dimension::Time, unit: 1e-6 };
const NETWORK_TIME: Figure = Figure { key: "network_latency_us", dimension: Dimension::Time, unit: 1e-6 };

impl Figure {
    /// Returns the given value, or else `other`.
    fn value(&self, given: &Option<Quantity>, other: Option<f64>) -> Result<Option<f64>, MachineError> {
        match given {
            Some(quantity) => Ok(Some(quantity.value(self.key, self.dimension, self.unit)?)),
            None => Ok(other),
        }
    }

    /// Like [`Self::value`], for a figure that a machine needs.
    fn needed(&self, given: &Option<Quantity>, other: Option<f64>) -> Result<f64, MachineError> {
        self.value(given, other)?.ok_or(MachineError::Missing { key: self.key })
    }
}

fn count(key: &'static str, given: Option<u32>, other: Option<u32>) -> Result<u32, MachineError> {
    match given.or(other) {
        Some(0) => Err(MachineError::Zero { key }),
        Some(count) => Ok(count),
        None => Err(MachineError::Missing { key }),
    }
}
