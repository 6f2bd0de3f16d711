//! A machine that the user names, or describes in a cluster file.

use std::path::Path;

use pipewright_cluster::catalogue::{MAX_FILE, by_name, from_toml};
use pipewright_cluster::machine::Machine;
use pipewright_system::bounded_file;

use crate::failure::Failure;

/// Returns the machine that an argument means: a name, or the path of a cluster file.
///
/// # Errors
/// When there is no such name, or the file cannot be read or has a mistake.
pub(crate) fn machine(argument: &str) -> Result<Machine, Failure> {
    let is_path = argument.contains(['/', '\\']) || argument.ends_with(".toml");
    if is_path {
        return in_file(Path::new(argument));
    }
    by_name(argument)
        .map_err(|error| Failure::input(format!("{error}; the path of a cluster file ends in .toml")))
}

fn in_file(path: &Path) -> Result<Machine, Failure> {
    let shown = path.display();
    let text = bounded_file::read_text(path, MAX_FILE as u64).map_err(|error| {
        Failure::input(format!(
            "{shown}: cannot read the cluster file: {error}; `pipewright clusters h100 -o {shown}` writes one"
        ))
    })?;
    from_toml(&text).map_err(|error| {
        let place = error.place;
        Failure::input(format!("{shown}:{}:{}: {}", place.line, place.column, error.kind))
    })
}
