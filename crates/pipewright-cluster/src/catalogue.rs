//! The machines that are known by name.

use std::sync::LazyLock;

use thiserror::Error;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::cluster_file;
use crate::machine::Machine;
use crate::suggest::nearest;
use crate::toml_file::{self, TomlFileError};

/// The largest cluster file that is read, in bytes.
pub const MAX_FILE: usize = toml_file::MAX_FILE;

/// There is no machine of a name.
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
    LazyLock::new(|| in_file(include_str!("machines.toml"), |_| None).unwrap_or_default());

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
            let hint = nearest(name, all.iter().flat_map(Machine::names));
            Err(UnknownMachine { name: name.chars().take(64).collect(), hint })
        }
    }
}

/// Returns the known machine that a name of a data sheet means: the machine of this name, or the one whose
/// short name is a word of it. If several short names are words, the longest one counts.
pub fn meant_by(name: &str) -> Option<Machine> {
    let all = machines();
    if let Some(machine) = all.iter().find(|machine| machine.is_called(name)) {
        return Some(machine.clone());
    }
    let name = name.to_lowercase();
    let words: Vec<&str> = name.split(|letter: char| !letter.is_alphanumeric()).collect();
    let length = |machine: &Machine| {
        machine.aliases.iter().filter(|alias| words.contains(&alias.as_str())).map(String::len).max()
    };
    all.iter().filter(|machine| length(machine).is_some()).max_by_key(|machine| length(machine)).cloned()
}

/// Reads a machine from the text of a cluster file: the keys of one machine. If a key is missing,
/// its value is that of the known machine that the name means.
///
/// # Errors
/// When a key is unknown or missing, or a value has the wrong unit or range.
pub fn from_toml(text: &str) -> Result<Machine, TomlFileError> {
    cluster_file::read(text, meant_by)
}

/// Reads the tables `[[machine]]` of a file. Values that a table lacks are those of the machine that `known`
/// returns for its name.
///
/// # Errors
/// Like [`from_toml`]. A text that is not TOML has no machines.
pub(crate) fn in_file(
    text: &str,
    known: impl Fn(&str) -> Option<Machine>,
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
