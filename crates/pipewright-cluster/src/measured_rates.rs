//! The rates, latencies and shares that a file of measurements may have, and what each of them replaces in a
//! machine.

use pipewright_document::{Dimension, Measure};

use crate::figure::{bandwidth, latency};
use crate::machine::Machine;

/// A rate or latency that a file may have.
#[derive(Debug)]
pub(crate) struct Rate {
    /// The table of the file.
    pub(crate) table: &'static str,
    /// Its key and values.
    pub(crate) measure: Measure,
    /// The part of the machine that it replaces.
    replaces: Replaced,
    /// Its unit and part in messages.
    pub(crate) noun: &'static str,
    /// Reads what a prediction uses for it.
    pub(crate) get: fn(&Machine) -> f64,
    /// The most that the machine's data sheet allows; infinite for latencies.
    pub(crate) most: fn(&Machine) -> f64,
    /// Changes what a prediction uses for it.
    set: fn(&mut Machine, f64),
}

/// The part of a machine that a rate replaces.
#[derive(Debug, Clone, Copy)]
enum Replaced {
    /// The figure with this key.
    Figure(&'static str),
    /// The constant with this name.
    Constant(&'static str),
}

impl Rate {
    /// Replaces what a prediction uses by a measured value, and the source of the figure or of the constants.
    pub(crate) fn apply(&self, machine: &mut Machine, value: f64) {
        (self.set)(machine, value);
        let (key, source) = match self.replaces {
            Replaced::Figure(key) => (key, "measured".to_owned()),
            Replaced::Constant(name) => {
                ("constants", format!("{}; `{name}` is measured", machine.source_of("constants")))
            }
        };
        machine.sources.insert(key.to_owned(), source);
    }
}

impl PartialEq for Rate {
    fn eq(&self, other: &Self) -> bool {
        (self.table, self.measure.key) == (other.table, other.measure.key)
    }
}

const fn share(key: &'static str) -> Measure {
    Measure { key, dimension: Dimension::Share, unit: 1.0, least: 0.01, most: 1.0 }
}

/// All rates, in the order in which they are named and applied.
pub(crate) static RATES: [Rate; 8] = [
    Rate {
        table: "attention",
        measure: share("share"),
        replaces: Replaced::Constant("attention"),
        noun: "of the bf16 peak in attention",
        get: |machine| machine.constants.attention,
        most: |_| 1.0,
        set: |machine, value| machine.constants.attention = value,
    },
    Rate {
        table: "memory",
        measure: bandwidth("gb_per_s"),
        replaces: Replaced::Constant("memory"),
        noun: "GB/s of memory",
        get: |machine| machine.memory_bandwidth * machine.constants.memory,
        most: |machine| machine.memory_bandwidth,
        set: |machine, value| machine.constants.memory = value / machine.memory_bandwidth,
    },
    Rate {
        table: "network",
        measure: bandwidth("gb_per_s"),
        replaces: Replaced::Figure("network_gb_per_s"),
        noun: "GB/s between nodes",
        get: |machine| machine.network_bandwidth * machine.constants.link,
        most: |machine| machine.network_bandwidth,
        set: |machine, value| machine.network_bandwidth = value / machine.constants.link,
    },
    Rate {
        table: "network",
        measure: latency("latency_us"),
        replaces: Replaced::Figure("network_latency_us"),
        noun: "us of latency between nodes",
        get: |machine| machine.network_latency,
        most: |_| f64::INFINITY,
        set: |machine, value| machine.network_latency = value,
    },
    Rate {
        table: "node",
        measure: bandwidth("gb_per_s"),
        replaces: Replaced::Figure("node_gb_per_s"),
        noun: "GB/s inside a node",
        get: |machine| machine.node_bandwidth * machine.constants.link,
        most: |machine| machine.node_bandwidth,
        set: |machine, value| machine.node_bandwidth = value / machine.constants.link,
    },
    Rate {
        table: "node",
        measure: latency("latency_us"),
        replaces: Replaced::Figure("node_latency_us"),
        noun: "us of latency inside a node",
        get: |machine| machine.node_latency,
        most: |_| f64::INFINITY,
        set: |machine, value| machine.node_latency = value,
    },
    Rate {
        table: "products",
        measure: share("share"),
        replaces: Replaced::Constant("product"),
        noun: "of the bf16 peak in products",
        get: |machine| machine.constants.product,
        most: |_| 1.0,
        set: |machine, value| machine.constants.product = value,
    },
    Rate {
        table: "products",
        measure: share("share_fp8"),
        replaces: Replaced::Constant("product_fp8"),
        noun: "of the FP8 peak in products",
        get: |machine| machine.constants.product_fp8,
        most: |_| 1.0,
        set: |machine, value| machine.constants.product_fp8 = value,
    },
];
