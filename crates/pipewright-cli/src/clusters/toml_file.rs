//! Reads the TOML files of machines and measurements.

use std::io::{Error, ErrorKind};
use std::path::Path;

use pipewright_cluster::catalogue::MAX_FILE;
use pipewright_document::{Problems, Source};
use pipewright_system::bounded_file::read_text;

use crate::failure::Failure;

/// Reads a file. `what` is its name in errors, and `advice` is for a file that does not exist.
///
/// # Errors
/// When the file cannot be read, or has mistakes, each with the file, the line and the column.
pub(super) fn read<T>(
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
