//! Parts of checkpoints from hosts that do not see the folder of the checkpoints: a process writes its part into a
//! folder of its own host and sends it, and the process that commits puts it into the folder.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pipewright_system::bounded_file::create_fresh;

use super::error::CheckpointError;
use super::identity::FolderIdentity;
use super::save::{NOTE, Saving, TENSORS};
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

/// Puts the files that other processes send into a folder of checkpoints that another thread owns.
#[derive(Debug)]
pub struct PartReceiver {
    checkpoints: PathBuf,
    deadline: Duration,
    arrived: Arc<AtomicU64>,
    folder: Option<FolderIdentity>,
    /// The file that each process is sending.
    open: HashMap<WorldRank, OpenFile>,
}

/// A file of which some pieces have come.
#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    /// The positions of the pieces that have come.
    offsets: Vec<u64>,
    /// Their bytes.
    written: u64,
}

impl PartReceiver {
    /// Receives files for the checkpoints in a folder, which is created within `deadline`.
    pub fn new(checkpoints: PathBuf, deadline: Duration) -> Self {
        Self { checkpoints, deadline, arrived: Arc::default(), folder: None, open: HashMap::new() }
    }

    /// Returns the number of bytes that have arrived, for
    /// [`CheckpointWriter::start_receiving`](super::CheckpointWriter::start_receiving).
    pub fn arrived(&self) -> Arc<AtomicU64> {
        self.arrived.clone()
    }

    /// Keeps a piece of a file. A process sends one file after the other. The pieces of a file come in any order, because
    /// a short message may overtake a long one. The file is on the disk when all pieces are kept.
    ///
    /// # Errors
    /// When the name is not one of a part, a piece is not one of the file, or the file cannot be written.
    pub fn keep(&mut self, from: WorldRank, piece: PartPiece<'_>) -> Result<(), CheckpointError> {
        let kept = self.write(from, piece);
        if kept.is_err() {
            self.open.remove(&from);
        }
        kept
    }

    fn write(&mut self, from: WorldRank, piece: PartPiece<'_>) -> Result<(), CheckpointError> {
        let PartPiece { step, name, offset, of, bytes } = piece;
        let stem = name.strip_suffix(TENSORS).or_else(|| name.strip_suffix(NOTE));
        let number = stem.and_then(|stem| stem.strip_prefix("rank-"));
        if number.is_none_or(|number| number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()))
        {
            return Err(CheckpointError::Refused(format!(
                "`{name}` is not the name of a part of a checkpoint"
            )));
        }
        let folder = match &self.folder {
            Some(folder) => folder,
            None => {
                let found = FolderIdentity::find(&self.checkpoints, self.deadline)?;
                &*self.folder.insert(found)
            }
        };
        let saving = Saving::join(folder, step)?;
        if name.ends_with(NOTE) {
            return saving.put(name, &String::from_utf8_lossy(bytes));
        }
        let path = saving.file(name);
        let open = match self.open.entry(from) {
            Entry::Occupied(open) if open.get().path == path => open.into_mut(),
            entry => {
                let file = create_fresh(&path).map_err(CheckpointError::io("create", &path))?;
                let open = OpenFile { path: path.clone(), file, offsets: Vec::new(), written: 0 };
                entry.insert_entry(open).into_mut()
            }
        };
        let length = bytes.len() as u64;
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= of);
        if !is_inside || open.offsets.contains(&offset) || open.written + length > of {
            return Err(CheckpointError::Refused(format!(
                "{}: a piece of {length} bytes at {offset} is not one of its {of} bytes, or has come before",
                path.display()
            )));
        }
        let written = open.file.seek(SeekFrom::Start(offset)).and_then(|_| open.file.write_all(bytes));
        written.map_err(CheckpointError::io("write", &path))?;
        open.offsets.push(offset);
        open.written += length;
        self.arrived.fetch_add(length, Ordering::Relaxed);
        if open.written >= of
            && let Some(open) = self.open.remove(&from)
        {
            open.file.sync_all().map_err(CheckpointError::io("write", &path))?;
        }
        Ok(())
    }
}
