//! Reads the TOML files of machines and measurements.

use std::io::{Error, ErrorKind};
use std::path::Path;

use pipewright_cluster::toml_file::{MAX_FILE, TomlFileError};
use pipewright_system::bounded_file::read_text;

use crate::failure::Failure;

/// Reads a file. `what` is its name in errors, and `advice` is for a file that does not exist.
///
/// # Errors
/// When the file cannot be read, or has a mistake; the error has the file, the line and the column.
pub(super) fn read<T>(
    path: &Path,
    what: &str,
    advice: &str,
    parse: fn(&str) -> Result<T, TomlFileError>,
) -> Result<T, Failure> {
    let shown = path.display();
    let text = read_text(path, MAX_FILE as u64).map_err(|error| unreadable(path, what, &error, advice))?;
    parse(&text).map_err(|error| {
        let place = error.place;
        Failure::input(format!("{shown}:{}:{}: {}", place.line, place.column, error.kind))
    })
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
