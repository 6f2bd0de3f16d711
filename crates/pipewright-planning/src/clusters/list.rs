//! Prints machines with their figures and the source of each.

use std::fmt::Write;

use pipewright_cluster::figure::Figure;
use pipewright_cluster::machine::{Constants, Machine};
use pipewright_cluster::machine_json::MachineJson;
use serde::Serialize;

/// The columns of the first table: the keys of figures, and their titles.
const FIGURES: [(&str, &str); 8] = [
    ("bf16_tflops", "bf16 TFLOP/s"),
    ("fp8_tflops", "FP8 TFLOP/s"),
    ("memory_gb", "memory GB"),
    ("memory_gb_per_s", "GB/s"),
    ("node_gb_per_s", "node GB/s"),
    ("network_gb_per_s", "network GB/s"),
    ("gpus_per_node", "GPUs/node"),
    ("board_watts", "watts"),
];
/// The figures of the second table. The constants follow them.
const LATENCIES: [(&str, &str); 2] =
    [("node_latency_us", "node latency us"), ("network_latency_us", "network latency us")];

/// The titles of the constants, in the order of [`Constants::RANGES`], and the factors of their units.
const CONSTANTS: [(&str, f64); Constants::RANGES.len()] = [
    ("products", 1.0),
    ("FP8 products", 1.0),
    ("NVFP4 products", 1.0),
    ("attention", 1.0),
    ("memory", 1.0),
    ("collectives", 1.0),
    ("hidden", 1.0),
    ("launch us", 1e6),
];

/// Returns the machines as tables of their figures, and of their switches, latencies and constants, with the
/// sources below.
pub(crate) fn text(machines: &[Machine]) -> String {
    let mut text = format!("{:10}", "name");
    for (_, title) in FIGURES {
        let _ = write!(text, "  {title}");
    }
    text.push('\n');
    for machine in machines {
        let _ = writeln!(text, "{:10}{}", short_name(machine), cells(machine, &FIGURES));
    }
    text.push_str("\nlinks, and the shares of rates and links that programs reach\n");
    let _ = write!(text, "{:10}  {:11}", "name", "node switch");
    for (_, title) in LATENCIES {
        let _ = write!(text, "  {title}");
    }
    for (title, _) in CONSTANTS {
        let _ = write!(text, "  {title}");
    }
    text.push('\n');
    for machine in machines {
        let switch = machine.node_switch.name();
        let _ = write!(text, "{:10}  {switch:11}{}", short_name(machine), cells(machine, &LATENCIES));
        for ((title, factor), value) in CONSTANTS.iter().zip(machine.constants.to_array()) {
            let value = (value * factor * 1000.0).round() / 1000.0;
            let _ = write!(text, "  {value:>width$}", width = title.len());
        }
        text.push('\n');
    }
    text.push_str("\nsources\n");
    for machine in machines {
        let _ = writeln!(text, "{:10}  {}: {}", short_name(machine), machine.name, machine.source);
        for (source, keys) in machine.keys_by_source() {
            if source != machine.source {
                let _ = writeln!(text, "{:10}  {}: {source}", "", keys.join(", "));
            }
        }
    }
    text + "\n`pipewright clusters NAME` shows one as a file to edit, with all its figures.\n"
}

/// Returns the figures of a machine below their titles.
fn cells(machine: &Machine, columns: &[(&str, &str)]) -> String {
    let cell = |(key, title): &(&str, &str)| {
        let figure = Figure::ALL.iter().find(|figure| figure.measure.key == *key);
        let value = figure.and_then(|figure| figure.of(machine));
        let value = value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        format!("  {value:>width$}", width = title.len())
    };
    columns.iter().map(cell).collect()
}

/// The first short name, or the name.
fn short_name(machine: &Machine) -> &str {
    machine.aliases.first().unwrap_or(&machine.name)
}

#[derive(Serialize)]
struct ListJson<'a> {
    clusters: Vec<MachineJson<'a>>,
}

/// Returns the machines as JSON.
pub(crate) fn json(machines: &[Machine]) -> String {
    let list = ListJson { clusters: machines.iter().map(MachineJson::of).collect() };
    serde_json::to_string(&list).expect("numbers can be written as JSON") + "\n"
}
