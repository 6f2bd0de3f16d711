//! Parts of checkpoints from hosts that do not see the folder of the checkpoints: a process writes its part into a
//! folder of its own host and sends it, and the process that commits puts it into the folder.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pipewright_system::bounded_file::create_fresh;

use super::error::CheckpointError;
use super::identity::FolderIdentity;
use super::piece_file::PieceFile;
use super::rank_file::{NOTE, TENSORS, is_rank_file, split};
use super::save::Saving;
use crate::ids::WorldRank;

/// Sends the files of a process to the process that commits.
pub trait PartSender: Send {
    /// Sends a file of the checkpoint of `step`, and returns when the other process has it on its disk. `sent` counts
    /// the bytes.
    ///
    /// # Errors
    /// When the file cannot be read, or the other process cannot hold it or does not answer.
    fn send(&self, step: u64, file: &Path, sent: &AtomicU64) -> Result<(), CheckpointError>;
}

/// A piece of a file of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct PartPiece<'a> {
    /// The step of the checkpoint.
    pub step: u64,
    /// The name of the file.
    pub name: &'a str,
    /// The position of the first byte.
    pub offset: u64,
    /// The length of the whole file.
    pub of: u64,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// The state that the thread that commits checkpoints shares with the one that receives parts of them. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct PartArrivals {
    bytes: Arc<AtomicU64>,
    /// The last step whose checkpoint was given up. It is locked while a piece is written.
    given_up: Arc<Mutex<Option<u64>>>,
}

impl PartArrivals {
    /// Returns the number of bytes that have arrived.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Refuses further parts of the checkpoint of a step, and of earlier ones.
    pub(super) fn give_up(&self, step: u64) {
        *self.lock() = Some(step);
    }

    fn lock(&self) -> MutexGuard<'_, Option<u64>> {
        self.given_up.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts the files that other processes send into a folder of checkpoints that another thread owns.
#[derive(Debug)]
pub struct PartReceiver {
    checkpoints: PathBuf,
    deadline: Duration,
    arrivals: PartArrivals,
    folder: Option<FolderIdentity>,
    /// The file that each process is sending, with its path.
    open: HashMap<WorldRank, (PathBuf, Incoming)>,
}

/// A file that has arrived in part.
#[derive(Debug)]
enum Incoming {
    Open(PieceFile),
    /// A piece could not be kept, so the others do not count.
    GivenUp,
}

impl PartReceiver {
    /// Receives files for the checkpoints in a folder, which is created within `deadline`.
    pub fn new(checkpoints: PathBuf, deadline: Duration) -> Self {
        Self { checkpoints, deadline, arrivals: PartArrivals::default(), folder: None, open: HashMap::new() }
    }

    /// Returns the counter of the bytes that have arrived, for
    /// [`CheckpointWriter::start_receiving`](super::CheckpointWriter::start_receiving).
    pub fn arrivals(&self) -> PartArrivals {
        self.arrivals.clone()
    }

    /// Keeps a piece of a file. A process sends one file after the other. The pieces of a file come in any order. The file
    /// is on the disk when all pieces are kept.
    ///
    /// # Errors
    /// When the name is not one of a part, a piece is not one of the file, the file cannot be written, or the file or the
    /// checkpoint was given up.
    pub fn keep(&mut self, from: WorldRank, piece: PartPiece<'_>) -> Result<(), CheckpointError> {
        let PartPiece { step, name, .. } = piece;
        let Some((common, ending)) = split(name).filter(|_| is_rank_file(name)) else {
            return Err(CheckpointError::Refused(format!(
                "`{name}` is not the name of a part of a checkpoint"
            )));
        };
        let arrivals = self.arrivals.clone();
        let given_up = arrivals.lock();
        if given_up.is_some_and(|last| step <= last) {
            return Err(CheckpointError::Refused(format!("the checkpoint of step {step} was given up")));
        }
        let folder = match &self.folder {
            Some(folder) => folder,
            None => {
                let found = FolderIdentity::find(&self.checkpoints, self.deadline)?;
                &*self.folder.insert(found)
            }
        };
        let saving = Saving::join(folder, step)?;
        let file = saving.file(&format!("{common}{TENSORS}"));
        if ending == NOTE {
            if self.open.get(&from).is_some_and(|(path, _)| *path == file) {
                return Err(CheckpointError::unusable(
                    &file,
                    "its note has come, and a part of the file is missing",
                ));
            }
            return saving.put(name, &String::from_utf8_lossy(piece.bytes));
        }
        let kept = self.write(from, &file, piece);
        match kept {
            Ok(true) => drop(self.open.remove(&from)),
            Ok(false) => {}
            Err(_) => drop(self.open.insert(from, (file, Incoming::GivenUp))),
        }
        kept.map(drop)
    }

    /// Writes a piece, and returns whether the file is whole.
    fn write(&mut self, from: WorldRank, path: &Path, piece: PartPiece<'_>) -> Result<bool, CheckpointError> {
        let PartPiece { offset, of, bytes, .. } = piece;
        let open = match self.open.entry(from) {
            Entry::Occupied(open) if open.get().0 == path => open.into_mut(),
            entry => {
                let file = create_fresh(path).map_err(CheckpointError::io("create", path))?;
                let file = Incoming::Open(PieceFile::on_disk(file));
                entry.insert_entry((path.to_owned(), file)).into_mut()
            }
        };
        let Incoming::Open(file) = &mut open.1 else {
            return Err(CheckpointError::unusable(path, "an earlier piece of the file could not be kept"));
        };
        let is_whole = file.put(offset, of, bytes).map_err(CheckpointError::io("write", path))?;
        self.arrivals.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(is_whole)
    }
}
