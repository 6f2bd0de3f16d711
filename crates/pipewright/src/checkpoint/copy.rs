//! Copies of the state of a run between its checkpoints, in a folder in the memory of a machine.
//!
//! A copy has the files of a checkpoint, but no process waits for another one: each writes the files of its
//! ranks and then a part of the manifest, which names them. A copy is complete when its parts name the
//! files of all ranks. The process that opens it puts the parts together, which makes it a checkpoint.
//!
//! ```text
//! /dev/shm/pipewright-0123456789abcdef/
//!   lock                      identifies the folder; it is not locked
//!   .saving-00000041/
//!     rank-0000.safetensors
//!     rank-0000.part          the manifest of this file, and the number of files of the copy
//!     rank-0001.safetensors
//!     rank-0001.part
//!   step-00000040/            a copy from which a run has resumed
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use pipewright_system::bounded_file::open_regular_with;

use super::committed::{COMMITTED, SAVING, committed_name, remove_folder, scratch_name};
use super::error::CheckpointError;
use super::folder::names;
use super::identity::{FolderIdentity, LOCK};
use super::manifest::Manifest;
use super::read::Checkpoint;
use super::save::Saving;
use super::state::{RankState, TrainingState};

/// The entry of a part's description with the number of files of the whole copy.
const FILES: &str = "files_of_copy";

/// The ending of the name of a part.
const PART: &str = ".part";

/// The copies that exist before the next one is written.
///
/// A process that has taken step `n` knows that the others have begun step `n`, and that they therefore have
/// completed their parts of the copy of step `n - 2`. They may still write the one of step `n - 1`.
const KEPT: usize = 2;

/// The most copies of a state that a folder has at the same time: the complete ones, and the one that is
/// written.
pub const COPIES: u64 = KEPT as u64 + 1;

/// A folder with copies of the state of one run. The processes of a machine share it.
#[derive(Clone, Debug)]
pub struct CopyFolder {
    identity: FolderIdentity,
}

impl CopyFolder {
    /// Creates the folder, which nobody but its user can read, unless it exists.
    ///
    /// # Errors
    /// When the system reports an error.
    pub fn create(path: &Path) -> Result<Self, CheckpointError> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(path).map_err(CheckpointError::io("create", path))?;
        let lock = path.join(LOCK);
        let options = File::options().read(true).write(true).create(true).truncate(false).clone();
        let lock = open_regular_with(&lock, &options).map_err(CheckpointError::io("create", &lock))?;
        Ok(Self { identity: FolderIdentity::new(path, lock) })
    }

    /// Finds a folder that exists.
    ///
    /// # Errors
    /// When there is none, or the system reports an error.
    pub fn find(path: &Path) -> Result<Self, CheckpointError> {
        FolderIdentity::find(path, Duration::ZERO).map(|identity| Self { identity })
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        self.identity.path()
    }

    /// Writes the part of this process: `state` has its ranks, and the whole copy has `files` files. Returns
    /// the path that the copy will have as a checkpoint.
    pub(super) fn write(
        &self,
        state: TrainingState,
        files: u32,
        written: &Arc<AtomicU64>,
    ) -> Result<PathBuf, CheckpointError> {
        let TrainingState { step, cursor, mut description, ranks } = state;
        let path = self.path().join(committed_name(step));
        let Some(first) = ranks.first().map(RankState::rank) else { return Ok(path) };
        self.remove_old(step)?;
        let saving = Saving::join(&self.identity, step)?.counting(written.clone());
        let own = ranks.into_iter().map(|rank| saving.write_file(rank)).collect::<Result<Vec<_>, _>>()?;
        description.insert(FILES.to_owned(), files.into());
        let part = Manifest::new(step, cursor, description, own);
        saving.put(&format!("rank-{:04}{PART}", first.get()), &part.to_text())?;
        Ok(path)
    }

    /// Returns the steps of the complete copies, the newest first. Their files are not read.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn complete(&self) -> Result<Vec<u64>, CheckpointError> {
        let steps = self.steps()?.into_iter().rev();
        Ok(steps.filter(|&step| self.committed(step).exists() || self.joined(step).is_some()).collect())
    }

    /// Opens a complete copy as a checkpoint, and reads every byte to verify it.
    ///
    /// # Errors
    /// When it is not complete, or as [`Checkpoint::open`].
    pub fn open(&self, step: u64) -> Result<Checkpoint, CheckpointError> {
        let committed = self.committed(step);
        if !committed.exists() {
            let none = || CheckpointError::NoneComplete { path: self.path().to_owned() };
            let manifest = self.joined(step).ok_or_else(none)?;
            let saving = Saving::join(&self.identity, step)?;
            saving.remove_manifest()?;
            saving.commit(&manifest)?;
        }
        Checkpoint::open(&committed)
    }

    /// Removes the copies of steps after `step`, which do not belong to a run that continues from there.
    ///
    /// # Errors
    /// When the path leads to another folder, or the system reports an error.
    pub fn remove_after(&self, step: u64) -> Result<(), CheckpointError> {
        self.identity.require()?;
        self.steps()?.into_iter().filter(|later| *later > step).try_for_each(|later| self.remove_step(later))
    }

    /// Removes the folder. It may already be gone.
    ///
    /// # Errors
    /// When the system reports an error.
    pub fn remove(path: &Path) -> Result<(), CheckpointError> {
        remove_folder(path)
    }

    /// Removes the copies that nobody needs any more when this process begins to write the copy of `step`.
    fn remove_old(&self, step: u64) -> Result<(), CheckpointError> {
        self.identity.require()?;
        let earlier: Vec<u64> = self.steps()?.into_iter().filter(|earlier| *earlier < step).collect();
        let old = &earlier[..earlier.len().saturating_sub(KEPT)];
        // Other processes of this machine remove the same copies at the same time. A copy
        // that remains is removed with the next one.
        old.iter().for_each(|&old| drop(self.remove_step(old)));
        Ok(())
    }

    fn remove_step(&self, step: u64) -> Result<(), CheckpointError> {
        [self.committed(step), self.path().join(scratch_name(step))]
            .iter()
            .try_for_each(|copy| remove_folder(copy))
    }

    fn committed(&self, step: u64) -> PathBuf {
        self.path().join(committed_name(step))
    }

    /// Returns the steps of all copies, complete or not, in their order.
    fn steps(&self) -> Result<BTreeSet<u64>, CheckpointError> {
        let step_of = |name: String| {
            let step = name.strip_prefix(COMMITTED).or_else(|| name.strip_prefix(SAVING))?;
            step.parse().ok()
        };
        Ok(names(self.path())?.into_iter().filter_map(step_of).collect())
    }

    /// Returns the manifest of a copy that was not opened yet; `None` if a part is missing or damaged.
    fn joined(&self, step: u64) -> Option<Manifest> {
        let folder = self.path().join(scratch_name(step));
        let parts = names(&folder).ok()?.into_iter().filter(|name| name.ends_with(PART));
        join(step, parts.filter_map(|part| Manifest::read_file(&folder.join(part)).ok()).collect())
    }
}

/// Puts the parts of a manifest together; `None` if they are not all the parts of one copy.
fn join(step: u64, mut parts: Vec<Manifest>) -> Option<Manifest> {
    parts.retain(|part| !part.files.is_empty());
    parts.sort_unstable_by(|one, other| one.files[0].name.cmp(&other.files[0].name));
    let first = parts.first()?;
    let (cursor, mut description) = (first.cursor, first.description.clone());
    let expected = description.remove(FILES)?;
    let fits = |part: &Manifest| {
        (part.step, part.cursor) == (step, cursor) && part.description.get(FILES) == Some(&expected)
    };
    if !parts.iter().all(fits) {
        return None;
    }
    let mut files: Vec<_> = parts.into_iter().flat_map(|part| part.files).collect();
    files.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    files.dedup_by(|one, other| one.name == other.name);
    let is_whole = expected.as_u64() == Some(files.len() as u64);
    is_whole.then(|| Manifest::new(step, cursor, description, files))
}

#[cfg(test)]
mod tests {
    use pipewright_data::Cursor;
    use serde_json::{Map, Value};

    use super::*;

    /// Returns the part of a process with these ranks, of a copy of `files` files.
    fn part(step: u64, files: u64, ranks: &[u32]) -> Manifest {
        let file = |rank: &u32| {
            let json = format!(r#"{{"name":"rank-{rank:04}.safetensors","bytes":1,"hash":"a"}}"#);
            serde_json::from_str(&json).expect("an entry of a manifest")
        };
        let description = Map::from_iter([(FILES.to_owned(), Value::from(files))]);
        Manifest::new(step, Cursor::default(), description, ranks.iter().map(file).collect())
    }

    fn check(parts: Vec<Manifest>, expected: Option<usize>) {
        let manifest = join(7, parts.clone());
        assert_eq!(manifest.as_ref().map(|manifest| manifest.files.len()), expected, "{parts:?}");
        assert!(manifest.is_none_or(|manifest| manifest.description.is_empty()));
    }

    #[test]
    fn a_copy_needs_the_parts_of_all_ranks_of_one_step_and_one_cut() {
        check(vec![part(7, 3, &[2]), part(7, 3, &[0, 1])], Some(3));
        check(vec![part(7, 1, &[0])], Some(1));
        check(vec![part(7, 3, &[0, 1])], None);
        check(vec![part(7, 2, &[0]), part(7, 2, &[0])], None);
        check(vec![part(7, 2, &[0]), part(6, 2, &[1])], None);
        check(vec![part(7, 2, &[0]), part(7, 4, &[1])], None);
        check(Vec::new(), None);
    }
}
