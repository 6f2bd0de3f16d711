//! The folder of a model in a cache of the Hugging Face hub.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::bounded_file::read_regular;

/// The reason why a cache folder does not say which of its snapshots is meant.
#[derive(Error)]
pub enum SnapshotError {
    /// The folder of the snapshots cannot be read.
    #[error("{}: cannot be read: {source}", folder.display())]
    Read {
        /// The folder of the snapshots.
        folder: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// There is no snapshot, or no reference to one of several.
    #[error(
        "{}: the cache folder has {count} snapshots, and no reference to one of them; name one of these folders",
        folder.display()
    )]
    Unclear {
        /// The folder of the snapshots.
        folder: PathBuf,
        /// Their number.
        count: usize,
    },
}

pipewright_schedule::message_as_debug!(SnapshotError);

/// Returns the folder of the files of a model: of a cache folder, the snapshot that `main` refers to, or the only one. Any
/// other path is returned as it is.
///
/// # Errors
/// When the snapshots cannot be read, or several could be meant.
pub fn snapshot(path: &Path) -> Result<PathBuf, SnapshotError> {
    let snapshots = path.join("snapshots");
    if path.join("config.json").exists() || !snapshots.is_dir() {
        return Ok(path.to_owned());
    }
    let reference = read_regular(&path.join("refs").join("main"), 4096).unwrap_or_default();
    let reference = String::from_utf8_lossy(&reference).trim().to_owned();
    let is_name = !reference.is_empty() && Path::new(&reference).file_name() == Some(reference.as_ref());
    let referred = snapshots.join(&reference);
    if is_name && referred.is_dir() {
        return Ok(referred);
    }
    let entries = fs::read_dir(&snapshots)
        .map_err(|source| SnapshotError::Read { folder: snapshots.clone(), source })?;
    let mut found: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|entry| entry.is_dir()).collect();
    match found.len() {
        1 => Ok(found.remove(0)),
        count => Err(SnapshotError::Unclear { folder: snapshots, count }),
    }
}
