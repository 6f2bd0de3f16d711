//! Parts of checkpoints from hosts that do not see the folder of the checkpoints: a process writes its part into a
//! folder of its own host and sends it, and the process that commits puts it into the folder.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
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
    /// The file that each process is sending, and the bytes that have come.
    open: HashMap<WorldRank, (File, u64)>,
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

    /// Keeps a piece of a file. The pieces of one process come in their order. The file is on the disk when the last
    /// piece is kept.
    ///
    /// # Errors
    /// When the name is not one of a part, a piece is missing, or the file cannot be written.
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
        if offset == 0 {
            self.open.insert(from, (create_fresh(&path).map_err(CheckpointError::io("create", &path))?, 0));
        }
        let Some((file, written)) = self.open.get_mut(&from).filter(|(_, written)| *written == offset) else {
            return Err(CheckpointError::Refused(format!(
                "{}: a piece of the file is missing",
                path.display()
            )));
        };
        file.write_all(bytes).map_err(CheckpointError::io("write", &path))?;
        *written += bytes.len() as u64;
        self.arrived.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if *written >= of
            && let Some((file, _)) = self.open.remove(&from)
        {
            file.sync_all().map_err(CheckpointError::io("write", &path))?;
        }
        Ok(())
    }
}
