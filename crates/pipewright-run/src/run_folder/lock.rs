//! The right to write to a run's folder.
//!
//! Two files are locked: `lock` in the folder of the checkpoints, and the metrics, which a
//! [`RunLog`](pipewright::train::RunLog) of another program locks. So neither of them writes to a folder of the other.

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use pipewright::bounded_file::open_regular_with;
use pipewright::checkpoint::CheckpointFolder;
use pipewright_system::lock_file::LockFile;

use crate::run_folder::error::{RunFolderError, write_error};
use crate::run_folder::paths::{METRICS, checkpoints_of};

/// The time between two attempts to lock a folder.
const PAUSE: Duration = Duration::from_millis(50);

/// The locks of a run's folder. They remain until this, or what it was taken apart into, is dropped.
#[derive(Debug)]
pub struct RunLock {
    checkpoints: CheckpointFolder,
    /// The metrics, open for appending; `None` if the folder has no such regular file.
    metrics: Option<LockFile>,
}

impl RunLock {
    /// Locks a run's folder for this process.
    ///
    /// # Errors
    /// Fails if another process writes to the folder, or if the system refuses.
    pub fn take(run: &Path) -> Result<Self, RunFolderError> {
        let folder = checkpoints_of(run);
        let metrics = existing_metrics(run);
        if metrics.is_err() && folder.exists() {
            // The error of this lock says which process has it.
            CheckpointFolder::own(&folder)?;
        }
        Ok(Self { metrics: metrics?, checkpoints: CheckpointFolder::own(&folder)? })
    }

    /// Waits until no other process writes to a run's folder, at most for `patience`, and only until `is_stopped`. The
    /// folder is not locked afterwards.
    ///
    /// # Errors
    /// Fails if another process still writes to the folder. Other errors are left to those who lock the folder.
    pub fn wait(run: &Path, patience: Duration, is_stopped: impl Fn() -> bool) -> Result<(), RunFolderError> {
        let since = Instant::now();
        loop {
            match Self::take(run) {
                Err(error) if error.is_in_use() && (since.elapsed() >= patience || is_stopped()) => {
                    return Err(error);
                }
                Err(error) if error.is_in_use() => std::thread::sleep(PAUSE),
                _ => return Ok(()),
            }
        }
    }

    /// Returns the folder of the checkpoints and the metrics, which are created if they do not exist.
    pub(super) fn into_parts(self, run: &Path) -> Result<(CheckpointFolder, LockFile), RunFolderError> {
        let path = run.join(METRICS);
        let metrics = match self.metrics {
            Some(metrics) => metrics,
            None => {
                let created = open_regular_with(&path, File::options().append(true).create(true));
                locked(created.map_err(write_error(&path))?, &path)?
            }
        };
        Ok((self.checkpoints, metrics))
    }

    /// Returns the folder of the checkpoints.
    pub(super) fn checkpoints(&self) -> &CheckpointFolder {
        &self.checkpoints
    }
}

/// Returns the locked metrics, if the folder has some.
fn existing_metrics(run: &Path) -> Result<Option<LockFile>, RunFolderError> {
    let path = run.join(METRICS);
    match open_regular_with(&path, File::options().append(true)) {
        // Nothing else writes to a device or a pipe. It is refused when this process would write to it, and
        // so is a file that it may not write.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::InvalidInput | ErrorKind::PermissionDenied
            ) =>
        {
            Ok(None)
        }
        opened => locked(opened.map_err(write_error(&path))?, &path).map(Some),
    }
}

/// Locks the metrics.
pub(super) fn locked(metrics: File, path: &Path) -> Result<LockFile, RunFolderError> {
    LockFile::lock(metrics).map_err(|(_, error)| match error {
        TryLockError::WouldBlock => RunFolderError::InUse { path: path.to_owned() },
        TryLockError::Error(source) => write_error(path)(source),
    })
}
