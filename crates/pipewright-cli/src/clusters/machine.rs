//! A machine that the user names, or describes in a cluster file.

use std::path::Path;

use pipewright_cluster::catalogue::{by_name, from_toml};
use pipewright_cluster::machine::Machine;

use crate::clusters::toml_file;
use crate::failure::Failure;

/// Returns the machine that an argument means: a name, or the path of a cluster file.
///
/// # Errors
/// When the name is unknown, or the file cannot be read or has a mistake.
pub(crate) fn machine(argument: &str) -> Result<Machine, Failure> {
    let is_path = argument.contains(['/', '\\']) || argument.ends_with(".toml");
    if is_path {
        let advice = format!("`pipewright clusters h100 -o {argument}` writes one");
        return toml_file::read(Path::new(argument), "the cluster file", &advice, from_toml);
    }
    by_name(argument)
        .map_err(|error| Failure::input(format!("{error}; the path of a cluster file ends in .toml")))
}
