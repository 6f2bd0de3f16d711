//! A machine that the user names, or describes in a cluster file; and how such files are read.

use std::io::{Error, ErrorKind};
use std::path::Path;

use pipewright_cluster::catalogue::{MAX_FILE, by_name, from_toml};
use pipewright_cluster::machine::Machine;
use pipewright_document::{Problems, Source};
use pipewright_system::bounded_file::read_text;

use crate::failure::Failure;

/// Returns the machine that an argument means: a name, or the path of a cluster file.
///
/// # Errors
/// When the name is unknown, or the file cannot be read or has a mistake.
pub(crate) fn machine(argument: &str) -> Result<Machine, Failure> {
    let is_path = argument.contains(['/', '\\']) || argument.ends_with(".toml");
    if is_path {
        let advice = format!("`pipewright clusters h100 -o {argument}` writes one");
        return read_toml(Path::new(argument), "the cluster file", &advice, from_toml);
    }
    by_name(argument)
        .map_err(|error| Failure::input(format!("{error}; the path of a cluster file ends in .toml")))
}

/// Reads a file. `what` is its name in errors, and `advice` is for a file that does not exist.
///
/// # Errors
/// When the file cannot be read, or has mistakes, each with the file, the line and the column.
pub(super) fn read_toml<T>(
    path: &Path,
    what: &str,
    advice: &str,
    parse: impl FnOnce(Source) -> Result<T, Problems>,
) -> Result<T, Failure> {
    let text = read_text(path, MAX_FILE as u64).map_err(|error| unreadable(path, what, &error, advice))?;
    parse(Source { name: path.display().to_string(), text }).map_err(Failure::from)
}

/// Returns the failure of a file that cannot be read. `advice` is for a file that does not exist.
pub(super) fn unreadable(path: &Path, what: &str, error: &Error, advice: &str) -> Failure {
    let advice = match error.kind() {
        ErrorKind::NotFound => format!("; {advice}"),
        ErrorKind::IsADirectory => "; name a file".to_owned(),
        _ => String::new(),
    };
    Failure::input(format!("{}: cannot read {what}: {error}{advice}", path.display()))
}
