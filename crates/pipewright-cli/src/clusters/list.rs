//! Prints machines with their figures and the source of each.

use std::collections::BTreeMap;
use std::fmt::Write;

use pipewright_cluster::figure::Figure;
use pipewright_cluster::machine::{Constants, Machine};
use serde::Serialize;

/// The columns of the table: the keys of figures, and their titles.
const COLUMNS: [(&str, &str); 8] = [
    ("bf16_tflops", "bf16 TFLOP/s"),
    ("fp8_tflops", "FP8 TFLOP/s"),
    ("memory_gb", "memory GB"),
    ("memory_gb_per_s", "GB/s"),
    ("node_gb_per_s", "node GB/s"),
    ("network_gb_per_s", "network GB/s"),
    ("gpus_per_node", "GPUs/node"),
    ("board_watts", "watts"),
];

/// Returns the machines as a table, with the sources of their figures below.
pub(crate) fn text(machines: &[Machine]) -> String {
    let mut text = format!("{:10}", "name");
    for (_, title) in COLUMNS {
        let _ = write!(text, "  {title}");
    }
    text.push('\n');
    for machine in machines {
        let _ = write!(text, "{:10}", short_name(machine));
        for (key, title) in COLUMNS {
            let figure = Figure::ALL.iter().find(|figure| figure.measure.key == key);
            let value = figure.and_then(|figure| figure.of(machine));
            let value = value.map_or_else(|| "-".to_owned(), |value| value.to_string());
            let _ = write!(text, "  {value:>width$}", width = title.len());
        }
        text.push('\n');
    }
    text.push_str("\nsources\n");
    for machine in machines {
        let _ = writeln!(text, "{:10}  {}: {}", short_name(machine), machine.name, machine.source);
        for (source, keys) in other_sources(machine) {
            let _ = writeln!(text, "{:10}  {}: {source}", "", keys.join(", "));
        }
    }
    text + "\n`pipewright clusters NAME` shows one as a file to edit, with all its figures.\n"
}

/// The first short name, or the name.
fn short_name(machine: &Machine) -> &str {
    machine.aliases.first().unwrap_or(&machine.name)
}

/// The sources that differ from the machine's, with the keys of the figures.
fn other_sources(machine: &Machine) -> Vec<(&str, Vec<&str>)> {
    let mut sources: Vec<(&str, Vec<&str>)> = Vec::new();
    for (key, source) in &machine.sources {
        match sources.iter_mut().find(|(known, _)| known == source) {
            Some((_, keys)) => keys.push(key),
            None => sources.push((source, vec![key])),
        }
    }
    sources
}

#[derive(Serialize)]
struct ListJson<'a> {
    clusters: Vec<MachineJson<'a>>,
}

#[derive(Serialize)]
struct MachineJson<'a> {
    name: &'a str,
    aliases: &'a [String],
    node_switch: &'static str,
    figures: BTreeMap<&'static str, FigureJson<'a>>,
    constants: BTreeMap<&'static str, f64>,
    constants_source: &'a str,
}

#[derive(Serialize)]
struct FigureJson<'a> {
    value: f64,
    source: &'a str,
}

/// Returns the machines as JSON.
pub(crate) fn json(machines: &[Machine]) -> String {
    let list = ListJson { clusters: machines.iter().map(machine_json).collect() };
    serde_json::to_string(&list).expect("numbers can be written as JSON") + "\n"
}

fn machine_json(machine: &Machine) -> MachineJson<'_> {
    let figure = |figure: &Figure| {
        let key = figure.measure.key;
        Some((key, FigureJson { value: figure.of(machine)?, source: machine.source_of(key) }))
    };
    let names = Constants::RANGES.iter().map(|range| range.name);
    MachineJson {
        name: &machine.name,
        aliases: &machine.aliases,
        node_switch: machine.node_switch.name(),
        figures: Figure::ALL.iter().filter_map(figure).collect(),
        constants: names.zip(machine.constants.to_array()).collect(),
        constants_source: machine.source_of("constants"),
    }
}
