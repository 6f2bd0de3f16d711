//! Copies of the state of a run between its checkpoints, in a folder in the memory of a machine.
//!
//! A copy has the files of a checkpoint, but no process waits for another one: each writes the files of its
//! ranks and then a part of the manifest, which names them. The files may be on several machines, and a
//! machine may also hold files of another one's ranks ([`CopyExchange`](super::CopyExchange)). A copy is
//! complete when the parts on all machines name the files of all ranks
//! ([`GatheredCopy`](super::GatheredCopy)).
//!
//! All users can make folders next to this one, so it must be private ([`private_folder`]), and nothing in it is
//! reached through a link.
//!
//! ```text
//! /dev/shm/pipewright-0123456789abcdef/
//!   lock                      identifies the folder; it is not locked
//!   .saving-00000041/
//!     rank-0000.safetensors
//!     rank-0000.part          the manifest of this file, and the number of files of the copy
//!     rank-0001.safetensors
//!     rank-0001.part
//!     rank-0002.safetensors   of a process on another machine
//!     rank-0002.received      its part
//!   step-00000040/            a copy from which a run has resumed
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use pipewright_system::bounded_file::{create_fresh, open_lock, open_unlinked};
use pipewright_system::lock_file::LockFile;
use pipewright_system::private_folder;

use super::committed::{COMMITTED, SAVING, committed_name, create_folder, remove_folder, scratch_name};
use super::copy_parts::{CopyPart, FILES, GatheredCopy, SERIES};
use super::error::CheckpointError;
use super::folder::names;
use super::identity::{FolderIdentity, LOCK};
use super::manifest::{MANIFEST, Manifest, StateFile};
use super::rank_file::name_of;
use super::read::verify;
use super::save::Saving;
use super::state::{RankState, TrainingState};

/// The endings of the names of parts: of this machine's processes, and of other machines' processes.
const PART: &str = ".part";
const RECEIVED: &str = ".received";

/// The ending of the name of a file that is not complete.
const DRAFT: &str = ".draft";

/// The copies that exist before the next one is written.
///
/// A process that has taken step `n` knows that the others have begun step `n`, and that they therefore have
/// written and sent their parts of the copy of step `n - 2`. They may still write the one of step `n - 1`.
const KEPT: usize = 2;

/// The most copies of a state that a folder has at the same time: the complete ones, and the one that is
/// written.
pub const COPIES: u64 = KEPT as u64 + 1;

/// A folder with copies of the state of one run. The processes of a machine share it, and other machines may
/// hold files in it.
#[derive(Clone, Debug)]
pub struct CopyFolder {
    identity: FolderIdentity,
}

impl CopyFolder {
    /// Creates the folder, unless it exists. Only its user can enter it.
    ///
    /// # Errors
    /// When another user could have made or could change the folder, or the system reports an error.
    pub fn create(path: &Path) -> Result<Self, CheckpointError> {
        private_folder::create(path).map_err(CheckpointError::NotPrivate)?;
        let lock = path.join(LOCK);
        let lock = open_lock(&lock).map_err(CheckpointError::io("create", &lock))?;
        Ok(Self { identity: FolderIdentity::new(path, LockFile::unlocked(lock)) })
    }

    /// Finds a folder that exists.
    ///
    /// # Errors
    /// When there is none, another user could have made or could change it, or the system reports an error.
    pub fn find(path: &Path) -> Result<Self, CheckpointError> {
        match private_folder::require(path) {
            // The identity reports that the folder is missing.
            Err(error) if !error.is_missing() => return Err(CheckpointError::NotPrivate(error)),
            _ => {}
        }
        FolderIdentity::find(path, Duration::ZERO).map(|identity| Self { identity })
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        self.identity.path()
    }

    /// Writes the part of this process: `state` has its ranks, and the whole copy has `files` files. All copies
    /// that one start of the processes makes have the same `series`.
    pub(super) fn write(
        &self,
        state: TrainingState,
        files: u32,
        series: &str,
        written: &Arc<AtomicU64>,
    ) -> Result<WrittenCopy, CheckpointError> {
        let TrainingState { step, cursor, mut description, ranks } = state;
        let path = self.path().join(committed_name(step));
        self.remove_old(step)?;
        let Some(first) = ranks.first().map(RankState::rank) else {
            return Ok(WrittenCopy { step, path, part: None });
        };
        let saving = Saving::join(&self.identity, step)?.counting(written.clone());
        let own = ranks.into_iter().map(|rank| saving.write_file(rank)).collect::<Result<Vec<_>, _>>()?;
        let names = own.iter().map(|file| file.name.clone()).collect();
        description.insert(FILES.to_owned(), files.into());
        description.insert(SERIES.to_owned(), series.into());
        let (name, text) = (name_of(first), Manifest::new(step, cursor, description, own).to_text());
        saving.put(&format!("{name}{PART}"), &text)?;
        Ok(WrittenCopy { step, path, part: Some(WrittenPart { name, text, files: names }) })
    }

    /// Returns the parts of copies in this folder, from processes of this machine and of other machines. A
    /// part that cannot be read does not count. The files that the parts name are not read.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn parts(&self) -> Result<Vec<CopyPart>, CheckpointError> {
        let mut parts = Vec::new();
        for step in self.steps()? {
            let committed = self.committed(step);
            if is_file(&committed.join(MANIFEST))
                && let Ok(manifest) = Manifest::read(&committed)
            {
                parts.extend(CopyPart::of_whole(manifest));
                continue;
            }
            let folder = self.scratch(step);
            for name in names(&folder)? {
                let is_part = name.ends_with(PART) || name.ends_with(RECEIVED);
                if !is_part || !is_file(&folder.join(&name)) {
                    continue;
                }
                let part = Manifest::read_file(&folder.join(&name)).ok().filter(|part| part.step == step);
                parts.extend(part.and_then(|part| CopyPart::of(part, name.ends_with(PART))));
            }
        }
        Ok(parts)
    }

    /// Compares every byte of a file of a copy with its hash.
    ///
    /// # Errors
    /// When the file is missing, damaged, cut short or of another step, or a link to another file.
    pub fn check_file(&self, step: u64, file: &StateFile) -> Result<(), CheckpointError> {
        let path = self.file(step, &file.name);
        match open_unlinked(&path, File::options().read(true)) {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                Err(CheckpointError::Io { action: "open", path, source })
            }
            _ => verify(&self.place(step), file, step).map(drop),
        }
    }

    /// Removes what is left here of another copy with the step of `copy`.
    ///
    /// # Errors
    /// When the path leads to another folder, or the system reports an error.
    pub fn make_room(&self, copy: &GatheredCopy) -> Result<(), CheckpointError> {
        self.identity.require()?;
        let committed = self.committed(copy.step());
        if committed.exists() && !self.is_committed(copy) {
            remove_folder(&committed)?;
        }
        Ok(())
    }

    /// Makes a checkpoint ([`CopyFolder::committed`]) of a copy. This folder must have all files of the copy,
    /// which are not read.
    ///
    /// # Errors
    /// When the path leads to another folder, or the system reports an error.
    pub fn assemble(&self, copy: &GatheredCopy) -> Result<(), CheckpointError> {
        if !self.is_committed(copy) {
            let saving = Saving::join(&self.identity, copy.step())?;
            saving.remove_manifest()?;
            saving.commit(copy.manifest())?;
        }
        Ok(())
    }

    /// Returns whether the checkpoint with the step of `copy` is that copy.
    fn is_committed(&self, copy: &GatheredCopy) -> bool {
        let (whole, series) = (copy.manifest(), copy.manifest().description.get(SERIES));
        Manifest::read(&self.committed(copy.step()))
            .is_ok_and(|manifest| manifest.files == whole.files && manifest.description.get(SERIES) == series)
    }

    /// Creates a file that another process sends, under a name that no reader knows.
    pub(super) fn create_draft(&self, step: u64, name: &str) -> Result<File, CheckpointError> {
        self.identity.require()?;
        let place = self.place(step);
        create_folder(&place).map_err(CheckpointError::io("create", &place))?;
        let draft = place.join(format!("{name}{DRAFT}"));
        create_fresh(&draft).map_err(CheckpointError::io("create", &draft))
    }

    /// Gives a file that has arrived its name.
    pub(super) fn keep_draft(&self, step: u64, name: &str) -> Result<(), CheckpointError> {
        let path = self.place(step).join(name);
        let draft = self.place(step).join(format!("{name}{DRAFT}"));
        fs::rename(draft, &path).map_err(CheckpointError::io("create", &path))
    }

    /// Removes a file that has not arrived whole.
    pub(super) fn drop_draft(&self, step: u64, name: &str) {
        // Best effort: the file is never used.
        let _ = fs::remove_file(self.place(step).join(format!("{name}{DRAFT}")));
    }

    /// Writes the part of a process of another machine, whose files have arrived.
    pub(super) fn put_received(&self, step: u64, name: &str, text: &str) -> Result<(), CheckpointError> {
        Saving::join(&self.identity, step)?.put(&format!("{name}{RECEIVED}"), text)
    }

    /// Returns the path of a file of a copy.
    pub(super) fn file(&self, step: u64, name: &str) -> PathBuf {
        self.place(step).join(name)
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
    /// When another user could have made or could change the folder, or the system reports an error.
    pub fn remove(path: &Path) -> Result<(), CheckpointError> {
        match private_folder::require(path) {
            Err(error) if error.is_missing() => Ok(()),
            Err(error) => Err(CheckpointError::NotPrivate(error)),
            Ok(()) => remove_folder(path),
        }
    }

    /// Removes the copies that are not needed when this process begins to write the copy of `step`.
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
        [self.committed(step), self.scratch(step)].iter().try_for_each(|copy| remove_folder(copy))
    }

    /// Returns the path that the copy of a step has as a checkpoint.
    pub fn committed(&self, step: u64) -> PathBuf {
        self.path().join(committed_name(step))
    }

    fn scratch(&self, step: u64) -> PathBuf {
        self.path().join(scratch_name(step))
    }

    /// Returns the folder that has the files of a copy.
    fn place(&self, step: u64) -> PathBuf {
        Some(self.committed(step))
            .filter(|committed| is_folder(committed))
            .unwrap_or_else(|| self.scratch(step))
    }

    /// Returns the steps of all copies, complete or not, in their order.
    fn steps(&self) -> Result<BTreeSet<u64>, CheckpointError> {
        let step_of = |name: String| {
            let step = name.strip_prefix(COMMITTED).or_else(|| name.strip_prefix(SAVING))?;
            step.parse().ok()
        };
        let folders = names(self.path())?.into_iter().filter(|name| is_folder(&self.path().join(name)));
        Ok(folders.filter_map(step_of).collect())
    }
}

/// Returns whether a path is a folder, and not a link to one.
fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

/// Returns whether a path is a file, and not a link to one.
fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_file())
}

/// The files of a copy that a process has written.
#[derive(Debug)]
pub(super) struct WrittenCopy {
    pub(super) step: u64,
    /// The path that the copy will have as a checkpoint.
    pub(super) path: PathBuf,
    /// The part that names them; `None` if the process has no rank with a part of the state.
    pub(super) part: Option<WrittenPart>,
}

/// The part of a process, and the files that it names.
#[derive(Debug)]
pub(super) struct WrittenPart {
    /// The part's name without its ending.
    pub(super) name: String,
    pub(super) text: String,
    pub(super) files: Vec<String>,
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    use pipewright_data::Cursor;

    use super::super::folder::CheckpointFolder;
    use super::*;
    use crate::ids::WorldRank;
    use crate::memory::RankMemory;

    const STEP: u64 = 7;
    const NAME: &str = "rank-0000.safetensors";

    /// A folder of copies, and a file of the user that nothing may change.
    struct Scratch {
        scratch: tempfile::TempDir,
        path: PathBuf,
    }

    impl Scratch {
        fn new() -> Self {
            let scratch = tempfile::tempdir().expect("a scratch folder");
            fs::write(scratch.path().join("mine"), "mine").expect("a file");
            let path = scratch.path().join("copies");
            Self { scratch, path }
        }

        fn mine(&self) -> PathBuf {
            self.scratch.path().join("mine")
        }

        fn folder(&self) -> CopyFolder {
            CopyFolder::create(&self.path).expect("the folder is ours")
        }

        /// Writes a copy without tensors.
        fn write(&self) -> Result<WrittenCopy, CheckpointError> {
            let rank = RankState {
                rank: WorldRank::new(0),
                stages: Vec::new(),
                loss_scale: None,
                memory: RankMemory::new(),
            };
            let (cursor, description) = (Cursor::default(), serde_json::Map::new());
            let state = TrainingState { step: STEP, cursor, description, ranks: vec![rank] };
            self.folder().write(state, 1, "series", &Arc::default())
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let is_unchanged = fs::read_to_string(self.mine()).is_ok_and(|text| text == "mine");
            assert!(is_unchanged || std::thread::panicking(), "a link was followed");
        }
    }

    #[test]
    fn a_folder_that_another_user_could_have_made_is_not_used() {
        let scratch = Scratch::new();
        scratch.write().expect("the folder is ours");
        assert_eq!(scratch.folder().parts().map(|parts| parts.len()).ok(), Some(1));
        let refused = || {
            for result in [CopyFolder::find(&scratch.path), CopyFolder::create(&scratch.path)] {
                assert!(matches!(result, Err(CheckpointError::NotPrivate(_))), "{result:?}");
            }
            CopyFolder::remove(&scratch.path).expect_err("it is not removed either");
        };
        fs::set_permissions(&scratch.path, fs::Permissions::from_mode(0o755)).expect("an own folder");
        refused();
        fs::set_permissions(&scratch.path, fs::Permissions::from_mode(0o700)).expect("an own folder");
        CopyFolder::find(&scratch.path).expect("the folder is ours");
        if chown(&scratch.path, Some(65534), None).is_ok() {
            refused();
            let own = fs::metadata(scratch.mine()).expect("a file").uid();
            chown(&scratch.path, Some(own), None).expect("this is root");
        }
        let moved = scratch.scratch.path().join("moved");
        fs::rename(&scratch.path, &moved).expect("a free name");
        symlink(&moved, &scratch.path).expect("a link");
        refused();
    }

    #[test]
    fn links_in_the_folder_are_neither_written_nor_read() {
        let scratch = Scratch::new();
        let folder = scratch.folder();
        let part = folder.scratch(STEP);
        fs::create_dir(&part).expect("a folder");
        for name in [NAME, "rank-0000.part", "rank-0000.part.draft", "rank-0001.safetensors.draft"] {
            symlink(scratch.mine(), part.join(name)).expect("a link");
        }
        drop(folder.create_draft(STEP, "rank-0001.safetensors").expect("the link is removed"));
        let written = scratch.write().expect("the links are removed").part.expect("a part");
        assert_eq!(written.files, [NAME]);
        // Links to the same bytes.
        let parts = folder.parts().expect("a folder");
        let (file, elsewhere) = (part.join(NAME), scratch.scratch.path().join("elsewhere"));
        let gathered = GatheredCopy::gather(&[parts]).pop().expect("it is complete");
        let stored = gathered.manifest().files[0].clone();
        folder.check_file(STEP, &stored).expect("its hash is right");
        fs::rename(&file, &elsewhere).expect("a free name");
        symlink(&elsewhere, &file).expect("a link");
        folder.check_file(STEP, &stored).expect_err("a link");
        let moved = scratch.scratch.path().join("moved");
        fs::rename(&part, &moved).expect("a free name");
        symlink(&moved, &part).expect("a link");
        assert_eq!(folder.parts().ok(), Some(Vec::new()));
        scratch.write().expect_err("the place of the copy is a link");
        folder.create_draft(STEP, NAME).expect_err("the place of the copy is a link");
    }

    #[test]
    fn a_lock_that_is_not_a_file_of_its_own_is_refused() {
        let check = |plant: &dyn Fn(&Path, &Path)| {
            let scratch = Scratch::new();
            drop(scratch.folder());
            let lock = scratch.path.join(LOCK);
            fs::remove_file(&lock).expect("the lock");
            plant(&scratch.mine(), &lock);
            CopyFolder::create(&scratch.path).expect_err("the lock is planted");
            CheckpointFolder::own(&scratch.path).expect_err("the lock is planted");
        };
        check(&|mine, lock| symlink(mine, lock).expect("a link"));
        check(&|mine, lock| symlink(mine.with_file_name("missing"), lock).expect("a link"));
        check(&|mine, lock| fs::hard_link(mine, lock).expect("a second name"));
        check(&|_, lock| fs::create_dir(lock).expect("a folder"));
        check(&|_, lock| {
            let made = std::process::Command::new("mkfifo").arg(lock).status();
            assert!(made.is_ok_and(|status| status.success()), "a pipe, which nobody opens");
        });
    }
}
