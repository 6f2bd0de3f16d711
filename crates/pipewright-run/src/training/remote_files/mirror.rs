//! [`Mirror`]: the folder of a process on a host that does not see the files of the first process. It has the same files
//! as far as this process needs them: small files are whole, and files of tensors have the length and the header of the
//! whole file, the tensors of the process's ranks, and holes, which take no space on the disk.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pipewright::bounded_file::{open_lock, open_unlinked};

use crate::error::RunError;
use crate::training::remote_files::pieces::unwritten;

/// The folder in the home folder with everything that launches leave on a host.
pub(crate) const CACHE: &str = ".cache/pipewright";

/// The folder in it with the folders of processes.
const RUNS: &str = "runs";

/// The file in the folder of a process that the process locks, and the one in the folder of all.
const LOCK: &str = "lock";

/// The longest time for which the lock of the cache is waited for, and the time between two looks at it.
const LONGEST_LOCK: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(5);

/// The longest wait for that lock at the end of a process.
const SHORT_LOCK: Duration = Duration::from_secs(5);

/// The folder of this process. It is removed when this is dropped.
///
/// A lock file in it is locked as long as the process uses it, so the system says which folders are left over. Folders appear
/// and disappear only under the lock of the whole cache.
pub(crate) struct Mirror {
    folder: PathBuf,
    cache: PathBuf,
    #[expect(dead_code, reason = "it is locked as long as it is open")]
    lock: File,
}

impl Mirror {
    /// Creates the folder, and removes the folders of processes that have ended without it.
    ///
    /// # Errors
    /// Fails if the home folder takes no files.
    pub(crate) fn create() -> Result<Self, RunError> {
        let home = std::env::var_os("HOME").map_or_else(std::env::temp_dir, PathBuf::from);
        let cache = home.join(CACHE);
        Self::create_in(&cache, LONGEST_LOCK).map_err(|error| unwritten(&cache, &error))
    }

    pub(super) fn create_in(cache: &Path, patience: Duration) -> io::Result<Self> {
        let runs = cache.join(RUNS);
        fs::create_dir_all(&runs)?;
        let all = lock_within(&cache.join(LOCK), patience)?;
        remove_left(&runs);
        let folder = new_folder(&runs)?;
        let lock = open_lock(&folder.join(LOCK))?;
        lock.try_lock()?;
        drop(all);
        fs::create_dir(folder.join("run"))?;
        Ok(Self { folder, cache: cache.to_owned(), lock })
    }

    /// Returns the folder that takes the place of the folder of the run.
    pub(crate) fn run(&self) -> PathBuf {
        self.folder.join("run")
    }

    /// Returns the folder that takes the place of the model's folder.
    pub(crate) fn model(&self) -> PathBuf {
        self.folder.join("model")
    }

    /// Returns the folder that takes the place of the adapters' folder.
    pub(crate) fn adapter(&self) -> PathBuf {
        self.folder.join("adapter")
    }

    /// Returns whether a path is in the folder.
    pub(crate) fn has(&self, path: &Path) -> bool {
        path.starts_with(&self.folder)
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // Best effort: another process removes the folder too.
        if let Ok(_all) = lock_within(&self.cache.join(LOCK), SHORT_LOCK) {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Locks a file, which another process may lock for a moment.
fn lock_within(path: &Path, patience: Duration) -> io::Result<File> {
    let (lock, since) = (open_lock(path)?, Instant::now());
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if since.elapsed() >= patience => {
                let waited = patience.as_secs();
                let message = format!("another process has locked {} for {waited} s", path.display());
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
        }
    }
}

/// Creates a folder that no other process has. Processes of several containers may have one number.
fn new_folder(runs: &Path) -> io::Result<PathBuf> {
    let process = std::process::id();
    let mut names = (0..).map(|number| runs.join(format!("{process}-{number}")));
    names
        .find_map(|folder| match fs::create_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
            created => Some(created.map(|()| folder)),
        })
        .expect("there are endless names")
}

/// Removes the folders that no process has locked. The caller has the lock of the cache, so no folder is new.
fn remove_left(runs: &Path) {
    for entry in fs::read_dir(runs).into_iter().flatten().flatten() {
        let lock = open_unlinked(&entry.path().join(LOCK), File::options().read(true));
        let is_left = match &lock {
            Ok(lock) => lock.try_lock().is_ok(),
            // Its process has ended before it has locked it.
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        if is_left {
            // Best effort: it only takes space.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
