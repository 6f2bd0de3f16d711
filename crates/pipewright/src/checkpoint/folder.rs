//! A folder of checkpoints: which ones are complete, which one is the newest, and which process may write.
//!
//! The prefix of a name says its state: `step-00000040` is complete, `.saving-...` is being written, and
//! `.removing-...` is being removed. `best` is a link to one of the complete checkpoints.

use std::fs::{self, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use pipewright_system::bounded_file::open_lock;
use pipewright_system::lock_file::LockFile;

use super::committed::{
    COMMITTED, REMOVING, SAVING, committed_name, publish, remove_committed, remove_folder,
};
use super::error::CheckpointError;
use super::identity::{FolderIdentity, LOCK};
use super::manifest::{MANIFEST, Manifest};
use super::read::Checkpoint;

/// The link to the best checkpoint, and its name before it replaces an earlier link.
const BEST: &str = "best";
const LINKING: &str = ".linking-best";

/// A folder of checkpoints that no other process writes to.
///
/// The folder's `lock` file holds the owner's process id. The system locks it, and unlocks it when the
/// process ends for any reason, so a lock never remains.
///
/// The path may lead to another folder while the process runs, for example if a user moves the folder. Every
/// method that writes fails then, and changes nothing.
#[derive(Debug)]
pub struct CheckpointFolder {
    /// Its lock file is locked while it is open.
    identity: FolderIdentity,
}

impl CheckpointFolder {
    /// Takes ownership of the folder, creates it if it does not exist, and removes incomplete checkpoints of
    /// an earlier owner. A checkpoint that is complete except for its final name gets that name.
    ///
    /// # Errors
    /// When another process owns it, or the system reports an error.
    pub fn own(path: &Path) -> Result<Self, CheckpointError> {
        fs::create_dir_all(path).map_err(CheckpointError::io("create", path))?;
        let folder = Self { identity: FolderIdentity::new(path, lock(path)?) };
        for name in names(path)? {
            let leftover = path.join(&name);
            match Manifest::read(&leftover) {
                Ok(manifest) if name.starts_with(SAVING) => {
                    publish(&leftover, &folder.identity, manifest.step)?;
                }
                _ if name.starts_with(SAVING) || name.starts_with(REMOVING) => remove_folder(&leftover)?,
                _ => {}
            }
        }
        Ok(folder)
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        self.identity.path()
    }

    /// Returns the identity of the folder, for others that write next to the checkpoints. The lock remains
    /// while a clone of it exists.
    pub fn identity(&self) -> &FolderIdentity {
        &self.identity
    }

    /// Removes all checkpoints but the `keep` newest and the best.
    ///
    /// # Errors
    /// When the path leads to another folder, or the system reports an error.
    pub fn keep_newest(&self, keep: usize) -> Result<(), CheckpointError> {
        self.identity.require()?;
        let path = self.path();
        let all = Self::list(path)?;
        let best = fs::read_link(path.join(BEST)).map(|name| path.join(name)).ok();
        let old = all[..all.len().saturating_sub(keep)].iter().map(|(_, checkpoint)| checkpoint);
        old.filter(|checkpoint| best.as_ref() != Some(*checkpoint))
            .try_for_each(|checkpoint| remove_committed(checkpoint, &self.identity))
    }

    /// Makes `best` a link to the checkpoint of a step, which [`CheckpointFolder::keep_newest`] then keeps.
    /// Removes the link if there is no step or no complete checkpoint of it.
    ///
    /// # Errors
    /// When the path leads to another folder, or the system reports an error.
    pub fn set_best(&self, step: Option<u64>) -> Result<(), CheckpointError> {
        self.identity.require()?;
        let path = self.path();
        let (link, scratch) = (path.join(BEST), path.join(LINKING));
        let name = step.map(committed_name).filter(|name| path.join(name).join(MANIFEST).exists());
        let Some(name) = name else { return remove_link(&link) };
        remove_link(&scratch)?;
        symlink(&name, &scratch).map_err(CheckpointError::io("create", &scratch))?;
        fs::rename(&scratch, &link).map_err(CheckpointError::io("create", &link))
    }

    /// Returns the path of the best checkpoint in a folder. There may be none.
    pub fn best_of(path: &Path) -> PathBuf {
        path.join(BEST)
    }

    /// Returns the complete checkpoints in a folder with their steps, oldest first, without reading them. A
    /// folder that does not exist has no checkpoints.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn list(path: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
        let step_of = |name: &str| name.strip_prefix(COMMITTED)?.parse::<u64>().ok();
        let names = names(path)?.into_iter();
        let mut found: Vec<_> =
            names.filter_map(|name| step_of(&name).map(|step| (step, path.join(name)))).collect();
        found.sort_unstable();
        Ok(found)
    }

    /// Opens the newest complete checkpoint in a folder.
    ///
    /// # Errors
    /// As [`Checkpoint::open`], or when there is no complete checkpoint.
    pub fn newest(path: &Path) -> Result<Checkpoint, CheckpointError> {
        match Self::list(path)?.pop() {
            Some((_, checkpoint)) => Checkpoint::open(&checkpoint),
            None => Err(CheckpointError::NoneComplete { path: path.to_owned() }),
        }
    }

    /// Returns whether this folder is a checkpoint and not a folder of checkpoints.
    pub fn is_checkpoint(path: &Path) -> bool {
        path.join(MANIFEST).exists()
            || path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(COMMITTED))
    }
}

/// Makes a relative link to a folder.
#[cfg(unix)]
fn symlink(name: &str, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(name, link)
}

/// Makes a relative link to a folder.
#[cfg(windows)]
fn symlink(name: &str, link: &Path) -> std::io::Result<()> {
    std::os::windows::fs::symlink_dir(name, link)
}

/// Removes a link if it exists. It never removes a folder.
fn remove_link(path: &Path) -> Result<(), CheckpointError> {
    let removed = if cfg!(windows) { fs::remove_dir(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(CheckpointError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Returns the names in a folder; none if it does not exist.
pub(super) fn names(path: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(CheckpointError::Io { action: "read", path: path.to_owned(), source }),
    };
    let name = |entry: std::io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    entries.map(name).collect::<std::io::Result<_>>().map_err(CheckpointError::io("read", path))
}

fn lock(folder: &Path) -> Result<LockFile, CheckpointError> {
    /// The most bytes that the owner's process id has.
    const LONGEST: u64 = 64;
    let path = folder.join(LOCK);
    let file = open_lock(&path).map_err(CheckpointError::io("open", &path))?;
    let mut file = match LockFile::lock(file) {
        Ok(file) => file,
        Err((file, TryLockError::WouldBlock)) => {
            let mut owner = String::new();
            let read = file.take(LONGEST).read_to_string(&mut owner);
            let owner = read.ok().map(|_| owner.trim().to_owned());
            let owner = owner.filter(|owner| !owner.is_empty());
            return Err(CheckpointError::Locked { path: folder.to_owned(), owner });
        }
        Err((_, TryLockError::Error(source))) => {
            return Err(CheckpointError::Io { action: "lock", path, source });
        }
    };
    let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    written.map_err(CheckpointError::io("write", &path))?;
    Ok(file)
}
