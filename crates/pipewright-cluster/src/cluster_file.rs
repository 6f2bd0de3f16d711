//! Machines as TOML: the keys of [`Figure::ALL`], `name`, `aliases`, `source`, and the tables `[constants]`,
//! `[sources]` and `[measured]`.
//!
//! A file describes one machine. If a known machine has the same name, or the words of its short name are in
//! the name, keys that are missing have the known machine's values.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use pipewright_document::{Dimension, Measure, Problem, Reader, Table, Value};

use crate::figure::{Figure, sourced_keys};
use crate::machine::{ConstantRange, Constants, Machine, Switch};
use crate::measured_tables;

/// Reads the machine of a table. `place` is the table's name in messages, and `known` returns the machines that
/// a name means. `further` reads keys that are not the machine's own.
pub(crate) fn machine(
    place: &str,
    table: &Table,
    problems: &mut Vec<Problem>,
    known: impl FnOnce(&str) -> Vec<Machine>,
    further: impl FnOnce(&mut Reader<'_>),
) -> Option<Machine> {
    let mut reader = Reader::new(place, table, problems);
    reader.require(&["name"]);
    let name = reader.text("name");
    let mut known = name.as_deref().map(known).unwrap_or_default();
    if let (Some(name), 2..) = (&name, known.len()) {
        let machines: Vec<String> = known.iter().map(|machine| format!("`{}`", machine.name)).collect();
        let sentence = format!("`name` is `{name}`, which means {}", machines.join(" and "));
        reader.report("name", sentence, "use the words of one of them");
    }
    let known = known.pop();
    let is_known = known.is_some();
    let mut machine = known.unwrap_or_else(|| Machine::unknown(name.as_deref().unwrap_or_default()));
    let has_all = machine.known_keys().all(|key| gives(table, key));
    machine.based_on = (is_known && !has_all).then(|| machine.name.clone());
    machine.name = name.clone().unwrap_or_default();
    for figure in Figure::ALL {
        if let Some(value) = reader.measure(figure.measure) {
            (figure.set)(&mut machine, value);
        }
    }
    machine.aliases = reader
        .read("aliases", "a list of names, such as [\"h100\"]", |value| {
            value.as_list()?.iter().map(|name| name.as_text().map(str::to_owned)).collect()
        })
        .unwrap_or_default();
    let switch = reader.word("node_switch", &Switch::ALL.map(|switch| (switch.name(), switch)));
    // How published tables of machines say that the GPUs of a node are linked pairwise.
    let is_mesh = reader.flag("mesh");
    if let (Some(switch), Some(is_mesh)) = (switch, is_mesh)
        && is_mesh != (switch == Switch::Mesh)
    {
        let sentence = format!("`mesh` is {is_mesh}, and `node_switch` is \"{}\"", switch.name());
        reader.report("mesh", sentence, "leave `mesh` out");
    }
    let mesh = is_mesh.filter(|&is_mesh| is_mesh).map(|_| Switch::Mesh);
    machine.node_switch = switch.or(mesh).unwrap_or(machine.node_switch);
    if let Some(table) = reader.table("constants", "a table of shares") {
        machine.constants = constants(reader.inner("[constants]", table), machine.constants);
    }
    if let Some(table) = reader.table("measured", "a table of measurements") {
        let mut measured = reader.inner("[measured]", table);
        machine.measured = measured_tables::read(&mut measured);
        measured.finish();
    }
    let given = reader.table("sources", "a table of texts");
    let given = given.map(|table| sources(reader.inner("[sources]", table))).unwrap_or_default();
    let source = reader.text("source");
    if let (Some(name), false) = (&name, is_known) {
        report_missing(&mut reader, table, name);
    }
    further(&mut reader);
    reader.finish();
    set_sources(&mut machine, table, source, given);
    machine.assume_half_peak();
    Some(machine)
}

/// Reports figures without which a machine that is not known cannot be predicted.
fn report_missing(reader: &mut Reader<'_>, table: &Table, name: &str) {
    let missing = |figure: &&Figure| figure.is_needed && table.get(figure.measure.key).is_none();
    for figure in Figure::ALL.iter().filter(missing) {
        let key = figure.measure.key;
        let sentence = format!("`{key}` is missing, and no known machine is named `{name}`");
        reader.report(key, sentence, "add it, or use the name of a known machine");
    }
    if ["bf16_tflops", "fp8_tflops", "f32_tflops"].iter().all(|key| table.get(key).is_none()) {
        let sentence = "`bf16_tflops` is missing, and so are `fp8_tflops` and `f32_tflops`";
        reader.report("bf16_tflops", sentence, "add one of them");
    }
}

fn constants(mut reader: Reader<'_>, known: Constants) -> Constants {
    let mut constants = known.to_array();
    for (constant, range) in constants.iter_mut().zip(Constants::RANGES) {
        *constant = reader.measure(accepted(range)).unwrap_or(*constant);
    }
    reader.finish();
    Constants::from_array(constants)
}

/// The values of a constant that a file may have. A share of a measured rate may be outside of what is plausible for a
/// data sheet's.
fn accepted(range: ConstantRange) -> Measure {
    let (least, most) = if range.name == "launch" { (0.0, 1e-3) } else { (range.least.min(0.01), 1.0) };
    Measure { key: range.name, dimension: Dimension::Share, unit: 1.0, least, most }
}

fn sources(mut reader: Reader<'_>) -> BTreeMap<String, String> {
    let sources = sourced_keys().filter_map(|key| Some((key.to_owned(), reader.text(key)?))).collect();
    reader.finish();
    sources
}

/// Returns the constants that a file gives.
fn given_constants(table: &Table) -> Vec<&'static str> {
    let Some(given) = table.get("constants").and_then(Value::as_table) else { return Vec::new() };
    let names = Constants::RANGES.iter().map(|range| range.name);
    names.filter(|name| given.get(name).is_some()).collect()
}

/// Returns whether a file gives a figure, or all constants.
fn gives(table: &Table, key: &str) -> bool {
    match key {
        "constants" => given_constants(table).len() == Constants::RANGES.len(),
        _ => table.get(key).is_some(),
    }
}

/// Returns the source of the constants if a file gives some of them. `known` is the source of the other constants.
fn source_of_constants(table: &Table, known: &str, own: &str) -> Option<String> {
    let names: Vec<String> = given_constants(table).iter().map(|name| format!("`{name}`")).collect();
    (!names.is_empty()).then(|| format!("{known}; {} from {own}", names.join(", ")))
}

/// Sets where each figure comes from: `given` and `source` are from the file, and figures that are not in the
/// file keep the source of the known machine.
fn set_sources(
    machine: &mut Machine,
    table: &Table,
    source: Option<String>,
    given: BTreeMap<String, String>,
) {
    let own = source.unwrap_or_else(|| "the cluster file".into());
    let mut sources = BTreeMap::new();
    let of_constants = source_of_constants(table, machine.source_of("constants"), &own);
    for key in sourced_keys() {
        let of_key = match (given.get(key), &of_constants) {
            (Some(text), _) => text,
            (None, _) if gives(table, key) => &own,
            (None, Some(mixed)) if key == "constants" => mixed,
            (None, _) => machine.source_of(key),
        };
        // A figure that is not known has no source.
        if *of_key != own && !of_key.is_empty() {
            sources.insert(key.to_owned(), of_key.to_owned());
        }
    }
    machine.sources = sources;
    machine.source = own;
}

/// Returns a machine as the text of a cluster file, with a comment for each key.
pub fn to_toml(machine: &Machine) -> String {
    let mut text = String::new();
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let mut line = |key: &str, value: &str, comment: &str| {
        let assignment = format!("{key} = {value}");
        let _ = match comment {
            "" => writeln!(text, "{assignment}"),
            comment => writeln!(text, "{assignment:32} # {comment}"),
        };
    };
    line("name", &quoted(&machine.name), "");
    let aliases: Vec<String> = machine.aliases.iter().map(|alias| quoted(alias)).collect();
    line("aliases", &format!("[{}]", aliases.join(", ")), "");
    line("source", &quoted(&machine.source), "");
    for figure in Figure::ALL {
        if let Some(value) = figure.of(machine) {
            line(figure.measure.key, &value.to_string(), figure.meaning);
        }
    }
    let switch = format!("node_switch = \"{}\"", machine.node_switch.name());
    let _ = writeln!(text, "{switch:32} # between the GPUs of a node: none, mesh, forwards or reduces");
    text.push_str("\n# Shares of these figures that programs reach.\n[constants]\n");
    for (range, value) in Constants::RANGES.into_iter().zip(machine.constants.to_array()) {
        let assignment = format!("{} = {value}", range.name);
        let Measure { least, most, .. } = accepted(range);
        let _ = writeln!(text, "{assignment:32} # from {least} to {most}");
    }
    if !machine.sources.is_empty() {
        text.push_str("\n# Where figures are published, if `source` does not say so.\n[sources]\n");
        for (key, source) in &machine.sources {
            let _ = writeln!(text, "{key} = {}", quoted(source));
        }
    }
    text + &machine.measured.to_toml()
}
