//! Whether the folder at a path is still the one that a process began to write to.
//!
//! A path may lead to another folder later: the first one is moved, removed, or a link is changed. The lock
//! file of a folder of checkpoints identifies the folder. It stays open, so the system does not give its
//! number to another file.

use std::fs::{self, File, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_system::bounded_file::open_unlinked;
use pipewright_system::lock_file::LockFile;

use super::error::CheckpointError;

/// The file that the owner of a folder locks.
pub(super) const LOCK: &str = "lock";

/// Time between two attempts to find a lock file.
const LOOK: Duration = Duration::from_millis(2);

/// A folder of checkpoints as a process found it, recognised by its lock file.
///
/// A process that writes to a folder calls [`FolderIdentity::require`] before each write, so that it never
/// writes to another folder that has taken the place of its own.
#[derive(Clone, Debug)]
pub struct FolderIdentity {
    path: PathBuf,
    lock: Arc<LockFile>,
}

impl FolderIdentity {
    /// Returns the identity of the folder whose lock file is open.
    pub(super) fn new(path: &Path, lock: LockFile) -> Self {
        Self { path: path.to_owned(), lock: Arc::new(lock) }
    }

    /// Returns the identity of a folder that another process owns. Waits until `deadline` for its owner to
    /// create it.
    ///
    /// # Errors
    /// When the folder has no lock file at the deadline, or the system reports an error.
    pub fn find(path: &Path, deadline: Duration) -> Result<Self, CheckpointError> {
        let lock = path.join(LOCK);
        let since = Instant::now();
        loop {
            match open_unlinked(&lock, File::options().read(true)) {
                Ok(file) => return Ok(Self::new(path, LockFile::unlocked(file))),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(source) => return Err(CheckpointError::Io { action: "open", path: lock, source }),
            }
            if since.elapsed() >= deadline {
                let waited = deadline.as_secs_f64();
                return Err(CheckpointError::unusable(
                    path,
                    format!(
                        "this process has not found the folder of the checkpoints within {waited:.1} s: every process of the \
                         run must see this folder; use a shared file system"
                    ),
                ));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the cause of an error in this folder: the folder itself if it is lost, otherwise the error.
    /// The folder may be moved between a check and a write.
    pub fn cause_of(&self, error: CheckpointError) -> CheckpointError {
        self.require().err().unwrap_or(error)
    }

    /// Checks that the path still leads to this folder.
    ///
    /// # Errors
    /// When the folder was moved or removed, when another folder has its path, or when the system reports an
    /// error.
    pub fn require(&self) -> Result<(), CheckpointError> {
        let lock = self.path.join(LOCK);
        let own = self.lock.metadata().map_err(CheckpointError::io("look at", &lock))?;
        match fs::symlink_metadata(&lock) {
            Ok(found) if is_same(&own, &found) => Ok(()),
            Ok(_) => Err(CheckpointError::FolderReplaced { path: self.path.clone() }),
            Err(error) if error.kind() == ErrorKind::NotFound && self.path.exists() => {
                Err(CheckpointError::FolderReplaced { path: self.path.clone() })
            }
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Err(CheckpointError::FolderGone { path: self.path.clone() })
            }
            Err(source) => Err(CheckpointError::Io { action: "look at", path: lock, source }),
        }
    }

    /// Returns the error that explains a failed write: the folder is not the same any more, or else `error`.
    pub(super) fn explain(&self, error: CheckpointError) -> CheckpointError {
        match self.require() {
            Err(cause @ (CheckpointError::FolderGone { .. } | CheckpointError::FolderReplaced { .. })) => {
                cause
            }
            _ => error,
        }
    }
}

/// Returns whether two entries are the same file.
#[cfg(unix)]
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;

    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Returns whether two entries are the same file. Elsewhere the system gives files no number, so their times
/// tell them apart.
#[cfg(not(unix))]
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    one.created().ok() == other.created().ok()
}
