//! The machines that are known by name.

use std::ops::Range;
use std::sync::LazyLock;

use pipewright_document::{Problem, Problems, Reader, Source, Table, nearest};
use thiserror::Error;

use crate::cluster_file;
use crate::machine::Machine;

/// The largest cluster file that is read, in bytes.
pub const MAX_FILE: usize = 1 << 20;

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
static KNOWN: LazyLock<Vec<Machine>> = LazyLock::new(|| {
    let read = |table: &Table, problems: &mut Vec<Problem>| {
        Some(machines_of(&mut Reader::new("the file", table, problems), |_| Vec::new(), |_, _| {}))
    };
    Table::read(include_str!("machines.toml"), MAX_FILE, read).unwrap_or_default()
});

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
            let meant = match meant_by(name).as_slice() {
                [meant] => Some(meant.aliases[0].clone()),
                _ => nearest(name, all.iter().flat_map(Machine::names)).map(str::to_owned),
            };
            let hint = meant.as_deref().map_or_else(String::new, hint_at);
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

/// Returns the hint that a name is the nearest one.
pub(crate) fn hint_at(name: &str) -> String {
    format!("; the nearest name is `{name}`")
}

/// Reads a machine from a cluster file: the keys of one machine. If the name means a known machine, missing
/// keys have its values.
///
/// # Errors
/// When a key is unknown or missing, a value has the wrong unit or range, or the name means several machines.
pub fn from_toml(source: impl Into<Source>) -> Result<Machine, Problems> {
    Table::read(source, MAX_FILE, |table, problems| {
        cluster_file::machine("the cluster file", table, problems, meant_by, |_| {})
    })
}

/// Reads the tables `[[machine]]` of a file. If `known` returns one machine for the name of a table, the table's
/// machine has its values for missing keys. `further` gets the number of a table, from 1, and reads keys that are not the
/// machine's own.
pub(crate) fn machines_of(
    file: &mut Reader<'_>,
    known: impl Fn(&str) -> Vec<Machine>,
    mut further: impl FnMut(usize, &mut Reader<'_>),
) -> Vec<Machine> {
    let tables = file.tables("machine", "tables [[machine]]").unwrap_or_default();
    let machine = |(index, table)| {
        cluster_file::machine("[[machine]]", table, file.problems, &known, |reader| {
            further(index + 1, reader);
        })
    };
    tables.into_iter().enumerate().filter_map(machine).collect()
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
