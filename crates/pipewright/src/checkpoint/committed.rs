//! The names of checkpoints in their folder, and the moves between them: a scratch folder gets its final
//! name, and a complete checkpoint loses it before it is removed.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::Path;

use super::error::CheckpointError;
use super::identity::FolderIdentity;

pub(super) const COMMITTED: &str = "step-";
pub(super) const SAVING: &str = ".saving-";
pub(super) const REMOVING: &str = ".removing-";

/// Returns the name of the complete checkpoint of `step`.
pub(super) fn committed_name(step: u64) -> String {
    format!("{COMMITTED}{step:08}")
}

/// Returns the name of the folder while the checkpoint of `step` is written.
pub(super) fn scratch_name(step: u64) -> String {
    format!("{SAVING}{step:08}")
}

/// Gives a complete scratch folder its final name, and removes an earlier checkpoint of the same step.
pub(super) fn publish(scratch: &Path, folder: &FolderIdentity, step: u64) -> Result<(), CheckpointError> {
    let committed = folder.path().join(committed_name(step));
    remove_committed(&committed, folder)?;
    folder.require()?;
    fs::rename(scratch, &committed).map_err(CheckpointError::io("create", &committed))?;
    sync_folder(folder.path())
}

/// Removes a checkpoint of this folder so that an incomplete one never has the name of a complete one.
pub(super) fn remove_committed(checkpoint: &Path, folder: &FolderIdentity) -> Result<(), CheckpointError> {
    folder.require()?;
    let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
    let doomed = checkpoint.with_file_name(format!("{REMOVING}{name}"));
    remove_folder(&doomed)?;
    match fs::rename(checkpoint, &doomed) {
        Ok(()) => remove_folder(&doomed),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(source) => Err(CheckpointError::io("remove", checkpoint)(source)),
    }
}

/// Creates a folder, unless it exists. A link to a folder has the name too, and is not one.
pub(super) fn create_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let is_folder = fs::symlink_metadata(path)?.is_dir();
            if is_folder { Ok(()) } else { Err(error) }
        }
        created => created,
    }
}

/// Removes a folder if it exists.
pub(super) fn remove_folder(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(CheckpointError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Waits until the folder's list of files is on disk.
pub(super) fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    // Other systems write a folder's list without this call, and do not open folders as files.
    if cfg!(unix) {
        File::open(path).and_then(|folder| folder.sync_all()).map_err(CheckpointError::io("write", path))?;
    }
    Ok(())
}
