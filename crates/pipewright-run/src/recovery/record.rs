//! Records in the folder of a run, which one process leaves there for another.

use std::path::Path;
use std::{fs, io};

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text, write_fresh};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Writes a record.
///
/// # Errors
/// Fails if the file cannot be written.
pub(super) fn leave(path: &Path, record: &impl Serialize) -> io::Result<()> {
    write_fresh(path, serde_json::to_string(record).map_err(io::Error::from)?.as_bytes())
}

/// Returns a record; `None` if there is none, or if it is not complete yet.
pub(super) fn find<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let text = read_regular_text(path, SMALL_TEXT).ok()?;
    serde_json::from_str(&text).ok()
}

/// Removes a record.
pub(super) fn remove(path: &Path) {
    // Best effort: the file may not exist, and the next record replaces it.
    let _ = fs::remove_file(path);
}
