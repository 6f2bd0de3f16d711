//! [`Mirror`]: the folder of a process on a host that does not see the files of the first process. It has the same files
//! as far as this process needs them: small files are whole, and files of tensors have the length and the header of the
//! whole file, the tensors of the process's ranks, and holes, which take no space on the disk.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{create_fresh, open_lock};
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, RunError};
use crate::training::remote_files::client::Client;
use crate::training::remote_files::message::{Answer, Folder, PIECE, Request};

/// The folder in the home folder with everything that launches leave on a host.
pub(crate) const CACHE: &str = ".cache/pipewright";

/// The folder in it with the folders of processes.
const RUNS: &str = "runs";

/// The file in the folder of a process that the process locks.
const LOCK: &str = "lock";

/// The most questions without an answer.
const WINDOW: usize = 4;

/// The longest header of a file of tensors.
const LONGEST_HEADER: u64 = 100_000_000;

/// A file of the first process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

impl Entry {
    /// Returns whether the file has tensors.
    pub(crate) fn has_tensors(&self) -> bool {
        self.name.ends_with(".safetensors")
    }

    /// Returns the files in a folder that `is_needed`.
    pub(crate) fn list(folder: &Path, is_needed: impl Fn(&str) -> bool) -> Vec<Self> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let entry = |entry: fs::DirEntry| {
            // A model in a cache has links to its files.
            let found = fs::metadata(entry.path()).ok().filter(fs::Metadata::is_file)?;
            Some(Self { name: entry.file_name().into_string().ok()?, bytes: found.len() })
        };
        let mut entries: Vec<Self> =
            entries.filter_map(entry).filter(|entry| is_needed(&entry.name)).collect();
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        entries
    }
}

/// The folder of this process. It is removed when this is dropped.
pub(crate) struct Mirror {
    folder: PathBuf,
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
        let runs = home.join(CACHE).join(RUNS);
        let folder = runs.join(std::process::id().to_string());
        let created = fs::create_dir_all(&runs).and_then(|()| {
            remove_left(&runs);
            fs::create_dir_all(folder.join("run"))?;
            let lock = open_lock(&folder.join(LOCK))?;
            lock.try_lock()?;
            Ok(lock)
        });
        let lock = created.map_err(|error| unwritten(&folder, &error))?;
        Ok(Self { folder, lock })
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
        // Best effort: another process removes it too.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Removes the folders of processes that have ended.
fn remove_left(runs: &Path) {
    for entry in fs::read_dir(runs).into_iter().flatten().flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let is_gone = number.and_then(Pid::from_raw).is_some_and(|pid| test_kill_process(pid).is_err());
        // Its process may be in another container.
        let lock = is_gone.then(|| File::open(entry.path().join(LOCK)));
        if lock.is_some_and(|lock| lock.is_ok_and(|lock| lock.try_lock().is_ok())) {
            // Best effort: it only takes space.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Brings files of the first process into a folder of the mirror: files of tensors without their tensors, unless `whole`,
/// and other files whole.
///
/// # Errors
/// Fails if a file does not come or cannot be written.
pub(crate) fn bring(
    client: &Client,
    from: Folder,
    entries: &[Entry],
    to: &Path,
    whole: bool,
) -> Result<(), RunError> {
    fs::create_dir_all(to).map_err(|error| unwritten(to, &error))?;
    for entry in entries {
        let path = to.join(&entry.name);
        let file = create_fresh(&path).and_then(|file| {
            file.set_len(entry.bytes)?;
            Ok(file)
        });
        let file = file.map_err(|error| unwritten(&path, &error))?;
        let bring = |range| bring_range(client, from, &entry.name, &file, range);
        let brought = if entry.has_tensors() && !whole {
            bring(0..8.min(entry.bytes)).and_then(|()| {
                let mut length = [0; 8];
                let read = File::open(&path).and_then(|file| file.read_exact_at(&mut length, 0));
                read.map_err(|error| error.to_string())?;
                let length = u64::from_le_bytes(length).min(LONGEST_HEADER);
                bring(8.min(entry.bytes)..length.saturating_add(8).min(entry.bytes))
            })
        } else {
            bring(0..entry.bytes)
        };
        brought.map_err(|reason| RunError::input(format!("{}: {reason}", path.display())))?;
    }
    Ok(())
}

/// Brings ranges of bytes into a file of the mirror.
///
/// # Errors
/// Fails if they do not come or cannot be written.
pub(crate) fn bring_ranges(
    client: &Client,
    from: Folder,
    path: &Path,
    ranges: &[Range<u64>],
) -> Result<(), RunError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let file = File::options().write(true).open(path).map_err(|error| unwritten(path, &error))?;
    let mut brought = ranges.iter().map(|range| bring_range(client, from, &name, &file, range.clone()));
    brought
        .try_for_each(|brought| brought)
        .map_err(|reason| RunError::input(format!("{}: {reason}", path.display())))
}

fn bring_range(
    client: &Client,
    folder: Folder,
    name: &str,
    file: &File,
    range: Range<u64>,
) -> Result<(), String> {
    let (mut next, mut waiting) = (range.start, VecDeque::new());
    loop {
        while next < range.end && waiting.len() < WINDOW {
            let length = PIECE.min(range.end - next);
            let request = Request::Read { folder, name: name.to_owned(), offset: next, length };
            waiting.push_back((next, length, client.send(request, &[])));
            next += length;
        }
        let Some((offset, length, number)) = waiting.pop_front() else { return Ok(()) };
        match client.wait(number)? {
            (Answer::Bytes, bytes) if bytes.len() as u64 == length => {
                file.write_all_at(&bytes, offset).map_err(|error| format!("cannot be written: {error}"))?;
            }
            _ => return Err("the first process has sent something else than the bytes".to_owned()),
        }
    }
}

/// Returns the failure of a host whose disk takes no files.
pub(crate) fn unwritten(path: &Path, error: &io::Error) -> RunError {
    let path = path.display();
    RunError::new(
        ErrorKind::WrongInput,
        format!("{path}: cannot be written on this host: {error}; make room in its home folder"),
    )
}
