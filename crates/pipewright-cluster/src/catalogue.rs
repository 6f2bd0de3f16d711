//! The machines that are known by name.

use std::ops::Range;
use std::sync::LazyLock;

use thiserror::Error;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::cluster_file;
use crate::machine::Machine;
use crate::suggest::{nearest, nearest_hint};
use crate::toml_file::{self, TomlFileError};

/// The largest cluster file that is read, in bytes.
pub const MAX_FILE: usize = toml_file::MAX_FILE;

/// The error of a name that no known machine has.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("there is no machine `{name}`{hint}; known are {}", known_names())]
pub struct UnknownMachine {
    /// The name.
    pub name: String,
    /// The nearest name, if there is one.
    pub hint: String,
}

pipewright_schedule::message_as_debug!(UnknownMachine);

/// The machines of `machines.toml`. A test reads the file, so nothing that is left out here goes unnoticed.
static KNOWN: LazyLock<Vec<Machine>> =
    LazyLock::new(|| in_file(include_str!("machines.toml"), |_| Vec::new()).unwrap_or_default());

/// Returns all known machines.
pub fn machines() -> &'static [Machine] {
    &KNOWN
}

/// Returns the machine of a name or a short name, without regard to case.
///
/// # Errors
/// When there is none. The message suggests the nearest name.
pub fn by_name(name: &str) -> Result<Machine, UnknownMachine> {
    let all = machines();
    match all.iter().find(|machine| machine.is_called(name)) {
        Some(machine) => Ok(machine.clone()),
        None => {
            let hint = match meant_by(name).as_slice() {
                [meant] => nearest_hint(&meant.aliases[0]),
                _ => nearest(name, all.iter().flat_map(Machine::names)),
            };
            Err(UnknownMachine { name: name.chars().take(64).collect(), hint })
        }
    }
}

/// Returns the known machines that a name of a data sheet means: the machine of this name, or all machines
/// that have a short name whose words follow each other in the name. A short name that is a part of a longer
/// one does not count: `H100-500W` means the machine with 500 watts alone.
pub fn meant_by(name: &str) -> Vec<Machine> {
    let all = machines();
    if let Some(machine) = all.iter().find(|machine| machine.is_called(name)) {
        return vec![machine.clone()];
    }
    let words = words(name);
    let mut mentions: Vec<(Range<usize>, &Machine)> = Vec::new();
    for machine in all {
        for alias in &machine.aliases {
            let alias = self::words(alias);
            let is_here = |&start: &usize| words[start..].starts_with(&alias);
            mentions
                .extend((0..words.len()).filter(is_here).map(|start| (start..start + alias.len(), machine)));
        }
    }
    let is_part = |one: &Range<usize>| {
        let is_around = |other: &Range<usize>| {
            other.len() > one.len() && other.start <= one.start && one.end <= other.end
        };
        mentions.iter().any(|(other, _)| is_around(other))
    };
    let mut meant: Vec<Machine> = Vec::new();
    for (range, machine) in &mentions {
        if !is_part(range) && meant.iter().all(|known| known.name != machine.name) {
            meant.push((*machine).clone());
        }
    }
    meant
}

/// Returns the words of a name in lower case.
fn words(name: &str) -> Vec<String> {
    let parts = name.split(|letter: char| !letter.is_alphanumeric());
    parts.filter(|word| !word.is_empty()).map(str::to_lowercase).collect()
}

/// Reads a machine from the text of a cluster file: the keys of one machine. If the name means a known
/// machine, missing keys have its values.
///
/// # Errors
/// When a key is unknown or missing, a value has the wrong unit or range, or the name means several machines.
pub fn from_toml(text: &str) -> Result<Machine, TomlFileError> {
    cluster_file::read(text, meant_by)
}

/// Reads the tables `[[machine]]` of a file. If `known` returns one machine for the name of a table, the table's
/// machine has its values for missing keys.
///
/// # Errors
/// Like [`from_toml`]. A text that is not TOML has no machines.
pub(crate) fn in_file(
    text: &str,
    known: impl Fn(&str) -> Vec<Machine>,
) -> Result<Vec<Machine>, TomlFileError> {
    let Ok(file) = DeTable::parse(text) else { return Ok(Vec::new()) };
    let Some(DeValue::Array(tables)) = file.get_ref().get("machine").map(Spanned::get_ref) else {
        return Ok(Vec::new());
    };
    let machine = |value: &Spanned<DeValue<'_>>| match value.get_ref() {
        DeValue::Table(table) => {
            Some(cluster_file::machine(text, &Spanned::new(value.span(), table.clone()), &known))
        }
        _ => None,
    };
    tables.iter().filter_map(machine).collect()
}

fn known_names() -> String {
    let names: Vec<String> =
        machines().iter().filter_map(|machine| machine.aliases.first().cloned()).collect();
    names.join(", ")
}

impl Machine {
    /// Returns whether `name` is the machine's name or one of its short names, without regard to case.
    pub fn is_called(&self, name: &str) -> bool {
        self.names().any(|own| own.eq_ignore_ascii_case(name))
    }

    /// Returns the short names and the name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.aliases.iter().chain([&self.name]).map(String::as_str)
    }
}
