//! The machines that are known by name.

use std::sync::LazyLock;

use serde::Deserialize;
use thiserror::Error;

use crate::machine::{Machine, MachineError, MachineTable};
use crate::suggest::nearest;

/// The largest cluster file that is read, in bytes.
pub const MAX_FILE: usize = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    machine: Vec<MachineTable>,
}

/// The errors of names and files of machines.
#[derive(Clone, PartialEq, Error)]
pub enum CatalogueError {
    /// There is no such machine.
    #[error("there is no machine `{name}`{hint}; known are {}", known_names())]
    Unknown {
        /// The name.
        name: String,
        /// The nearest name, if there is one.
        hint: String,
    },
    /// The file is not the description of a machine.
    #[error("the file does not describe a machine")]
    Unreadable(#[source] toml::de::Error),
    /// The file is too large.
    #[error("the file has more than {MAX_FILE} bytes; describe one machine")]
    TooLarge,
    /// A figure is wrong.
    #[error("machine `{name}`: {error}")]
    Machine {
        /// The machine.
        name: String,
        /// The cause.
        #[source]
        error: MachineError,
    },
}

pipewright_schedule::message_as_debug!(CatalogueError);

/// The machines of `machines.toml`. A test reads the file, so neither of the two filters removes anything.
static KNOWN: LazyLock<Vec<Machine>> = LazyLock::new(|| {
    let tables: Result<Tables, _> = toml::from_str(include_str!("machines.toml"));
    let tables = tables.map_or_else(|_| Vec::new(), |tables| tables.machine);
    tables.iter().filter_map(|table| table.machine(None).ok()).collect()
});

/// Returns all known machines.
pub fn machines() -> &'static [Machine] {
    &KNOWN
}

/// Returns the machine of a name or a short name, without regard to case.
///
/// # Errors
/// When there is none. The message suggests the nearest name.
pub fn by_name(name: &str) -> Result<Machine, CatalogueError> {
    let all = machines();
    match all.iter().find(|machine| machine.is_called(name)) {
        Some(machine) => Ok(machine.clone()),
        None => {
            let hint = nearest(name, all.iter().flat_map(Machine::names));
            Err(CatalogueError::Unknown { name: name.chars().take(64).collect(), hint })
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
pub fn from_toml(text: &str) -> Result<Machine, CatalogueError> {
    if text.len() > MAX_FILE {
        return Err(CatalogueError::TooLarge);
    }
    let table: MachineTable = toml::from_str(text).map_err(CatalogueError::Unreadable)?;
    of_table(&table)
}

/// Makes the machine of a table.
///
/// # Errors
/// When a figure is missing, or has the wrong unit or range.
pub fn of_table(table: &MachineTable) -> Result<Machine, CatalogueError> {
    let known = meant_by(table.name());
    let of_error = |error| CatalogueError::Machine { name: table.name().into(), error };
    table.machine(known.as_ref()).map_err(of_error)
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
