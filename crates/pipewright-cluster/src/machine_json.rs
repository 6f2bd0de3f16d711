//! A machine as JSON, for `pipewright clusters --format json` and for Python.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::figure::Figure;
use crate::machine::{Constants, Machine};

/// A machine with its figures and constants, under the keys of cluster files, and their sources.
#[derive(Debug, Serialize)]
pub struct MachineJson<'a> {
    name: &'a str,
    aliases: &'a [String],
    node_switch: &'static str,
    node_switch_source: &'a str,
    figures: BTreeMap<&'static str, FigureJson<'a>>,
    constants: BTreeMap<&'static str, f64>,
    constants_source: &'a str,
}

#[derive(Debug, Serialize)]
struct FigureJson<'a> {
    value: f64,
    source: &'a str,
}

impl<'a> MachineJson<'a> {
    /// Describes a machine. Figures that are not known are left out.
    pub fn of(machine: &'a Machine) -> Self {
        let figure = |figure: &Figure| {
            let key = figure.measure.key;
            Some((key, FigureJson { value: figure.of(machine)?, source: machine.source_of(key) }))
        };
        let names = Constants::RANGES.iter().map(|range| range.name);
        Self {
            name: &machine.name,
            aliases: &machine.aliases,
            node_switch: machine.node_switch.name(),
            node_switch_source: machine.source_of("node_switch"),
            figures: Figure::ALL.iter().filter_map(figure).collect(),
            constants: names.zip(machine.constants.to_array()).collect(),
            constants_source: machine.source_of("constants"),
        }
    }
}
