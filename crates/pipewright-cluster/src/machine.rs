//! A machine: the data sheet of a GPU, its links, and the constants of the cost model.
//!
//! A data sheet says what the hardware can do at most. The constants say which share of it programs reach.
//! Each has a meaning and a range, and belongs to a machine, never to a model or a run.

use std::collections::BTreeMap;

use crate::measured_times::MeasuredTimes;
use crate::stack_constants::Stacks;

/// A GPU with its links.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// The name.
    pub name: String,
    /// Short names.
    pub aliases: Vec<String>,
    /// Dense operations per second in bf16 and f16. A machine of a file has this peak: if it is not given, it is
    /// assumed to be half of the peak in FP8.
    pub bf16: Option<f64>,
    /// Dense operations per second in FP8; `None` if the machine has no FP8.
    pub fp8: Option<f64>,
    /// Dense operations per second in NVFP4; `None` if the machine has no products of 4 bits.
    pub nvfp4: Option<f64>,
    /// Operations per second in f32; `None` if they are not known.
    pub single: Option<f64>,
    /// Bytes of memory.
    pub memory: f64,
    /// Bytes per second of memory.
    pub memory_bandwidth: f64,
    /// Bytes per second from a GPU to the others of its node, in each direction.
    pub node_bandwidth: f64,
    /// Bytes per second from a GPU to other nodes, in each direction.
    pub network_bandwidth: f64,
    /// Bytes per second from a GPU to the memory of its host, in each direction; `None` if they are not known.
    pub host_bandwidth: Option<f64>,
    /// GPUs of a node, or of a domain of fast links.
    pub gpus_per_node: u32,
    /// Multiprocessors, among which the tiles of a product are divided.
    pub multiprocessors: u32,
    /// The switch between the GPUs of a node.
    pub node_switch: Switch,
    /// Watts of a GPU at most; `None` if they are not known.
    pub board_power: Option<f64>,
    /// Mean seconds between two failures of a GPU, its share of its host and the network included; `None` if
    /// they are not known.
    pub between_failures: Option<f64>,
    /// Seconds of a message inside a node, in addition to its bytes.
    pub node_latency: f64,
    /// Seconds of a message between nodes, in addition to its bytes.
    pub network_latency: f64,
    /// The shares that programs reach.
    pub constants: Constants,
    /// The constants of the stacks that run on the machine.
    pub stacks: Stacks,
    /// Measured times that replace predicted ones.
    pub measured: MeasuredTimes,
    /// The known machine whose figures count where a file gives none; `None` if the file gives all.
    pub based_on: Option<String>,
    /// Where the figures are published.
    pub source: String,
    /// Where single figures are published, by their keys, if `source` does not say so.
    pub sources: BTreeMap<String, String>,
}

/// The connection of the GPUs of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Switch {
    /// A bus, or links in an order that is not known.
    #[default]
    None,
    /// No switch, and a link between each two GPUs. A GPU reaches its full bandwidth only with all others at once.
    Mesh,
    /// A switch that forwards messages from each GPU to each other one at the full bandwidth.
    Forwards,
    /// A switch that also adds tensors on their way.
    Reduces,
}

impl Switch {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::None, Self::Mesh, Self::Forwards, Self::Reduces];

    /// Returns its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mesh => "mesh",
            Self::Forwards => "forwards",
            Self::Reduces => "reduces",
        }
    }
}

/// The constants of the cost model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Constants {
    /// The share of the bf16 peak that large products sustain.
    pub product: f64,
    /// The share of the FP8 peak that large products sustain, with their scaling.
    pub product_fp8: f64,
    /// The share of the NVFP4 peak that large products sustain, with their scaling.
    pub product_nvfp4: f64,
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
    pub const RANGES: [ConstantRange; 8] = [
        ConstantRange { name: "product", least: 0.3, most: 0.9 },
        ConstantRange { name: "product_fp8", least: 0.3, most: 0.85 },
        ConstantRange { name: "product_nvfp4", least: 0.2, most: 0.85 },
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
        product_nvfp4: 0.5,
        attention: 0.58,
        memory: 0.78,
        link: 0.75,
        hidden: 0.0,
        launch: 2e-6,
    };

    /// Returns the constants in the order of [`Self::RANGES`].
    pub fn to_array(self) -> [f64; 8] {
        let Self { product, product_fp8, product_nvfp4, attention, memory, link, hidden, launch } = self;
        [product, product_fp8, product_nvfp4, attention, memory, link, hidden, launch]
    }

    /// Makes constants in the order of [`Self::RANGES`].
    pub fn from_array(values: [f64; 8]) -> Self {
        let [product, product_fp8, product_nvfp4, attention, memory, link, hidden, launch] = values;
        Self { product, product_fp8, product_nvfp4, attention, memory, link, hidden, launch }
    }
}

/// The latency of a message inside a node, if it is not given, in seconds.
const NODE_LATENCY: f64 = 5e-6;
/// The latency of a message between nodes, if it is not given, in seconds.
const NETWORK_LATENCY: f64 = 1e-5;
/// The multiprocessors, if they are not given: as many as an H100 has.
const MULTIPROCESSORS: u32 = 132;
/// The source of a latency that is not given.
const ASSUMED_LATENCY: &str = "assumed: 5 us inside a node and 10 us between nodes";

impl Machine {
    /// Makes a machine whose needed figures are 0.
    pub(crate) fn unknown(name: &str) -> Self {
        let assumed = |key: &str, source: &str| (key.to_owned(), source.to_owned());
        Self {
            name: name.to_owned(),
            aliases: Vec::new(),
            bf16: None,
            fp8: None,
            nvfp4: None,
            single: None,
            memory: 0.0,
            memory_bandwidth: 0.0,
            node_bandwidth: 0.0,
            network_bandwidth: 0.0,
            host_bandwidth: None,
            gpus_per_node: 0,
            multiprocessors: MULTIPROCESSORS,
            node_latency: NODE_LATENCY,
            network_latency: NETWORK_LATENCY,
            node_switch: Switch::default(),
            board_power: None,
            between_failures: None,
            constants: Constants::EXPECTED,
            stacks: Stacks::FITTED,
            measured: MeasuredTimes::default(),
            based_on: None,
            source: String::new(),
            sources: BTreeMap::from([
                assumed("multiprocessors", "assumed: those of the H100"),
                assumed("node_latency_us", ASSUMED_LATENCY),
                assumed("network_latency_us", ASSUMED_LATENCY),
                assumed("node_switch", "assumed: none"),
                assumed("constants", "assumed: microbenchmarks of recent GPUs"),
            ]),
        }
    }

    /// Sets the peak in bf16 to half of the peak in FP8, or to the peak in f32, if only the latter is known.
    pub(crate) fn assume_half_peak(&mut self) {
        let source = match (self.bf16, self.fp8, self.single) {
            (None, Some(_), _) => "assumed: half of the peak in FP8",
            (None, None, Some(_)) => "assumed: the peak in f32",
            (Some(_), _, _) | (None, None, None) => return,
        };
        self.bf16 = Some(self.half_peak());
        self.sources.insert("bf16_tflops".to_owned(), source.to_owned());
    }

    /// Returns the bytes per second from a GPU to `ranks - 1` others of its node, in each direction.
    pub(crate) fn bandwidth_among(&self, ranks: u32) -> f64 {
        match self.node_switch {
            Switch::Mesh if (2..self.gpus_per_node).contains(&ranks) => {
                self.node_bandwidth * f64::from(ranks - 1) / f64::from(self.gpus_per_node - 1)
            }
            Switch::Mesh | Switch::None | Switch::Forwards | Switch::Reduces => self.node_bandwidth,
        }
    }

    /// Returns the source of the figure or of the constants with this key.
    pub fn source_of(&self, key: &str) -> &str {
        self.sources.get(key).unwrap_or(&self.source)
    }
}
