//! The figures of a machine's data sheet: their keys in cluster files, units and plausible ranges.

use pipewright_document::{Dimension, GIB, Measure};

use crate::machine::Machine;

/// A figure of a data sheet.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// Its key and values.
    pub measure: Measure,
    /// A description for people.
    pub meaning: &'static str,
    /// Whether a machine cannot be predicted without it.
    pub(crate) is_needed: bool,
    /// Reads it from a machine.
    pub(crate) get: fn(&Machine) -> Option<f64>,
    /// Writes it to a machine.
    pub(crate) set: fn(&mut Machine, f64),
}

impl Figure {
    /// All figures, in the order of cluster files.
    pub const ALL: [Self; 15] = [
        Self::optional(
            rate("bf16_tflops"),
            "dense operations in bf16, 10^12 per second",
            |machine| machine.bf16,
            |machine, value| machine.bf16 = Some(value),
        ),
        Self::optional(
            rate("fp8_tflops"),
            "dense operations in FP8, 10^12 per second",
            |machine| machine.fp8,
            |machine, value| machine.fp8 = Some(value),
        ),
        Self::optional(
            rate("nvfp4_tflops"),
            "dense operations in NVFP4, 10^12 per second",
            |machine| machine.nvfp4,
            |machine, value| machine.nvfp4 = Some(value),
        ),
        Self::optional(
            rate("f32_tflops"),
            "dense operations in f32, 10^12 per second",
            |machine| machine.single,
            |machine, value| machine.single = Some(value),
        ),
        Self::needed(
            // Data sheets call 2^30 bytes a GB.
            Measure { key: "memory_gb", dimension: Dimension::Size, unit: GIB, least: 0.1, most: 1e5 },
            "memory as sold, in units of 2^30 bytes",
            |machine| Some(machine.memory),
            |machine, value| machine.memory = value,
        ),
        Self::needed(
            bandwidth("memory_gb_per_s"),
            "bandwidth of the memory, 10^9 bytes per second",
            |machine| Some(machine.memory_bandwidth),
            |machine, value| machine.memory_bandwidth = value,
        ),
        Self::needed(
            bandwidth("node_gb_per_s"),
            "from a GPU to its node, each direction",
            |machine| Some(machine.node_bandwidth),
            |machine, value| machine.node_bandwidth = value,
        ),
        Self::needed(
            bandwidth("network_gb_per_s"),
            "from a GPU to other nodes, each direction",
            |machine| Some(machine.network_bandwidth),
            |machine, value| machine.network_bandwidth = value,
        ),
        Self::optional(
            bandwidth("host_gb_per_s"),
            "from a GPU to the memory of its host, each direction",
            |machine| machine.host_bandwidth,
            |machine, value| machine.host_bandwidth = Some(value),
        ),
        Self::needed(
            count("gpus_per_node"),
            "GPUs that the fast links connect",
            |machine| Some(f64::from(machine.gpus_per_node)),
            |machine, value| machine.gpus_per_node = value as u32,
        ),
        Self::optional(
            count("multiprocessors"),
            "multiprocessors of a GPU",
            |machine| Some(f64::from(machine.multiprocessors)),
            |machine, value| machine.multiprocessors = value as u32,
        ),
        Self::optional(
            latency("node_latency_us"),
            "latency of a message inside a node",
            |machine| Some(machine.node_latency),
            |machine, value| machine.node_latency = value,
        ),
        Self::optional(
            latency("network_latency_us"),
            "latency of a message between nodes",
            |machine| Some(machine.network_latency),
            |machine, value| machine.network_latency = value,
        ),
        Self::optional(
            Measure { key: "board_watts", dimension: Dimension::Power, unit: 1.0, least: 1.0, most: 1e5 },
            "power of a GPU at most, without its host",
            |machine| machine.board_power,
            |machine, value| machine.board_power = Some(value),
        ),
        Self::optional(
            Measure {
                key: "gpu_mtbf_hours",
                dimension: Dimension::Time,
                unit: 3600.0,
                least: 0.01,
                most: 1e8,
            },
            "mean time between failures of a GPU, with its share of host and network, hours",
            |machine| machine.between_failures,
            |machine, value| machine.between_failures = Some(value),
        ),
    ];

    /// Makes a figure without which a machine cannot be predicted.
    const fn needed(
        measure: Measure,
        meaning: &'static str,
        get: fn(&Machine) -> Option<f64>,
        set: fn(&mut Machine, f64),
    ) -> Self {
        Self { measure, meaning, is_needed: true, get, set }
    }

    /// Makes a figure that a file may leave out.
    const fn optional(
        measure: Measure,
        meaning: &'static str,
        get: fn(&Machine) -> Option<f64>,
        set: fn(&mut Machine, f64),
    ) -> Self {
        Self { is_needed: false, ..Self::needed(measure, meaning, get, set) }
    }

    /// Returns the figure of a machine as a plain number of its key, if it is known.
    pub fn of(&self, machine: &Machine) -> Option<f64> {
        (self.get)(machine).map(|value| self.measure.plain(value))
    }
}

/// The keys that have a source and are not figures.
const SOURCED: [&str; 2] = ["node_switch", "constants"];

/// The keys that have a source, in the order of cluster files.
pub(crate) fn sourced_keys() -> impl Iterator<Item = &'static str> {
    Figure::ALL.iter().map(|figure| figure.measure.key).chain(SOURCED)
}

impl Machine {
    /// Returns the keys that have a source, without figures that are not known.
    pub(crate) fn known_keys(&self) -> impl Iterator<Item = &'static str> {
        let is_unknown = |key: &str| {
            Figure::ALL.iter().any(|figure| figure.measure.key == key && figure.of(self).is_none())
        };
        sourced_keys().filter(move |key| !is_unknown(key))
    }

    /// Returns each source with the keys of its figures, in the order of cluster files. `node_switch` and
    /// `constants` are keys, too. Figures that are not known are left out.
    pub fn keys_by_source(&self) -> Vec<(&str, Vec<&'static str>)> {
        let mut groups: Vec<(&str, Vec<&'static str>)> = Vec::new();
        for key in self.known_keys() {
            let source = self.source_of(key);
            match groups.iter_mut().find(|(known, _)| *known == source) {
                Some((_, keys)) => keys.push(key),
                None => groups.push((source, vec![key])),
            }
        }
        groups
    }
}

const fn rate(key: &'static str) -> Measure {
    Measure { key, dimension: Dimension::Rate, unit: 1e12, least: 1e-5, most: 1e6 }
}

/// A rate in 10^9 bytes per second.
pub(crate) const fn bandwidth(key: &'static str) -> Measure {
    Measure { key, dimension: Dimension::Bandwidth, unit: 1e9, least: 0.001, most: 1e6 }
}

/// A time in microseconds.
pub(crate) const fn latency(key: &'static str) -> Measure {
    Measure { key, dimension: Dimension::Time, unit: 1e-6, least: 0.0, most: 1e6 }
}

const fn count(key: &'static str) -> Measure {
    Measure { key, dimension: Dimension::Count, unit: 1.0, least: 1.0, most: 65_536.0 }
}
