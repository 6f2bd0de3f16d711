//! Machines as TOML: the keys of [`Figure::ALL`], `name`, `aliases`, `source`, and the tables `[constants]`
//! and `[sources]`.
//!
//! A file describes one machine. If a known machine has the same name, or the words of its short name are in
//! the name, keys that are missing have the known machine's values.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::figure::{Figure, sourced_keys};
use crate::machine::{Constants, Machine, Switch};
use crate::quantity::{Dimension, Measure};
use crate::toml_file::{Key, Reader, TomlFileError, TomlFileErrorKind, Value};

/// The keys that are not figures.
const OTHER_KEYS: [&str; 6] = ["name", "aliases", "node_switch", "source", "constants", "sources"];

/// Reads the text of a cluster file. `known` returns the machines that a name means.
///
/// # Errors
/// When a key is unknown or missing, a value has the wrong unit or range, or the name means several machines.
pub(crate) fn read(text: &str, known: impl FnOnce(&str) -> Vec<Machine>) -> Result<Machine, TomlFileError> {
    let (_, table) = Reader::parse(text)?;
    machine(text, &table, known)
}

/// Makes the machine of a table in `text`.
///
/// # Errors
/// Like [`read`].
pub(crate) fn machine(
    text: &str,
    table: &Spanned<DeTable<'_>>,
    known: impl FnOnce(&str) -> Vec<Machine>,
) -> Result<Machine, TomlFileError> {
    Reader { text }.machine(table, known)
}

impl Reader<'_> {
    fn machine(
        self,
        table: &Spanned<DeTable<'_>>,
        known: impl FnOnce(&str) -> Vec<Machine>,
    ) -> Result<Machine, TomlFileError> {
        let start = table.span().start;
        let table = table.get_ref();
        let missing = |key, advice| self.at(start, TomlFileErrorKind::Missing { key, advice });
        let no_name = || missing("name", "; add the machine's name, such as `name = \"h100\"`".into());
        let name = self.text_in(table, "name")?.ok_or_else(no_name)?;
        let mut known = known(&name);
        if known.len() > 1 {
            let place = table.get("name").map_or(start, |value| value.span().start);
            let machines = known.into_iter().map(|machine| format!("`{}`", machine.name)).collect();
            return Err(self.at(place, TomlFileErrorKind::SeveralMachines { name, machines }));
        }
        let known = known.pop();
        let is_known = known.is_some();
        let mut machine = known.unwrap_or_else(|| Machine::unknown(&name));
        let has_all = machine.known_keys().all(|key| gives(table, key));
        machine.based_on = (is_known && !has_all).then(|| machine.name.clone());
        machine.name = name;
        machine.aliases = Vec::new();
        let given = self.sources(table)?;
        for (key, value) in table {
            self.add(&mut machine, key, value)?;
        }
        let has_none = |figure: &&Figure| figure.is_needed && !table.contains_key(figure.measure.key);
        if let Some(figure) = Figure::ALL.iter().find(has_none).filter(|_| !is_known) {
            let advice = format!(
                ", and no known machine is named `{}`; add it, or use the name of a known machine",
                machine.name
            );
            return Err(missing(figure.measure.key, advice));
        }
        if machine.bf16.is_none() && machine.fp8.is_none() {
            let advice = ", and so is `fp8_tflops`; add one of them".to_owned();
            return Err(missing("bf16_tflops", advice));
        }
        let source = self.text_in(table, "source")?;
        set_sources(&mut machine, table, source, given);
        machine.assume_half_peak();
        Ok(machine)
    }

    /// Adds a key of the file to a machine.
    fn add(self, machine: &mut Machine, key: &Key<'_>, value: &Value<'_>) -> Result<(), TomlFileError> {
        let word: &str = key.get_ref();
        if let Some(figure) = Figure::ALL.iter().find(|figure| figure.measure.key == word) {
            (figure.set)(machine, self.number(figure.measure, value)?);
            return Ok(());
        }
        match word {
            "aliases" => machine.aliases = self.names(value)?,
            "node_switch" => machine.node_switch = self.switch(value)?,
            "constants" => machine.constants = self.constants(machine.constants, value)?,
            // They are read before and after the figures.
            "name" | "source" | "sources" => {}
            _ => {
                let known = Figure::ALL.iter().map(|figure| figure.measure.key).chain(OTHER_KEYS);
                return Err(self.unknown(key, &known.collect::<Vec<_>>()));
            }
        }
        Ok(())
    }

    fn names(self, value: &Value<'_>) -> Result<Vec<String>, TomlFileError> {
        let wrong =
            |value: &Value<'_>| self.wrong_kind("aliases", value, "a list of names, such as [\"h100\"]");
        let DeValue::Array(items) = value.get_ref() else { return Err(wrong(value)) };
        let name = |item: &Value<'_>| match item.get_ref() {
            DeValue::String(name) => Ok(name.to_string()),
            _ => Err(wrong(item)),
        };
        items.iter().map(name).collect()
    }

    fn switch(self, value: &Value<'_>) -> Result<Switch, TomlFileError> {
        self.word("node_switch", value, &Switch::ALL.map(|switch| (switch.name(), switch)))
    }

    fn constants(self, known: Constants, value: &Value<'_>) -> Result<Constants, TomlFileError> {
        let DeValue::Table(table) = value.get_ref() else {
            return Err(self.wrong_kind("constants", value, "a table of shares"));
        };
        let mut constants = known.to_array();
        for (key, value) in table {
            let index = Constants::RANGES.iter().position(|range| range.name == key.get_ref());
            let known = || Constants::RANGES.map(|range| range.name);
            let index = index.ok_or_else(|| self.unknown(key, &known()))?;
            let range = Constants::RANGES[index];
            let (least, most) = (range.least, range.most);
            let measure = Measure { key: range.name, dimension: Dimension::Share, unit: 1.0, least, most };
            constants[index] = self.number(measure, value)?;
        }
        Ok(Constants::from_array(constants))
    }

    fn sources(self, table: &DeTable<'_>) -> Result<BTreeMap<String, String>, TomlFileError> {
        let Some(value) = table.get("sources") else { return Ok(BTreeMap::new()) };
        let DeValue::Table(sources) = value.get_ref() else {
            return Err(self.wrong_kind("sources", value, "a table of texts"));
        };
        let keys: Vec<&str> = sourced_keys().collect();
        let source = |(key, value): (&Key<'_>, &Value<'_>)| {
            let word: &str = key.get_ref();
            if !keys.contains(&word) {
                return Err(self.unknown(key, &keys));
            }
            match value.get_ref() {
                DeValue::String(text) => Ok((word.to_owned(), text.to_string())),
                _ => Err(self.wrong_kind(word, value, "text in quotes")),
            }
        };
        sources.iter().map(source).collect()
    }
}

/// Returns the constants that a file gives.
fn given_constants(table: &DeTable<'_>) -> Vec<&'static str> {
    let Some(DeValue::Table(given)) = table.get("constants").map(Spanned::get_ref) else { return Vec::new() };
    let names = Constants::RANGES.iter().map(|range| range.name);
    names.filter(|name| given.contains_key(*name)).collect()
}

/// Returns whether a file gives a figure, or all constants.
fn gives(table: &DeTable<'_>, key: &str) -> bool {
    match key {
        "constants" => given_constants(table).len() == Constants::RANGES.len(),
        _ => table.contains_key(key),
    }
}

/// Returns the source of the constants if a file gives some of them. `known` is the source of the other constants.
fn source_of_constants(table: &DeTable<'_>, known: &str, own: &str) -> Option<String> {
    let names: Vec<String> = given_constants(table).iter().map(|name| format!("`{name}`")).collect();
    (!names.is_empty()).then(|| format!("{known}; {} from {own}", names.join(", ")))
}

/// Sets where each figure comes from: `given` and `source` are from the file, and figures that are not in the
/// file keep the source of the known machine.
fn set_sources(
    machine: &mut Machine,
    table: &DeTable<'_>,
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
    for (range, value) in Constants::RANGES.iter().zip(machine.constants.to_array()) {
        let assignment = format!("{} = {value}", range.name);
        let _ = writeln!(text, "{assignment:32} # from {} to {}", range.least, range.most);
    }
    if !machine.sources.is_empty() {
        text.push_str("\n# Where figures are published, if `source` does not say so.\n[sources]\n");
        for (key, source) in &machine.sources {
            let _ = writeln!(text, "{key} = {}", quoted(source));
        }
    }
    text
}
