//! [`FileService`]: answers in the first process what other processes ask about its files.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pipewright::byte_channel::ByteChannel;
use pipewright::checkpoint::{PartPiece, PartReceiver};
use pipewright::ids::WorldRank;
use pipewright::train::data::{RowPlace, TokenBatch, TokenRows};
use pipewright_schedule::error_text::with_causes as sentence;

use crate::error::{ErrorKind, RunError};
use crate::training::remote_files::message::{
    Answer, Folder, PIECE, Question, Reply, Request, RowSet, SideShape, decoded, encoded,
};

/// The time between two looks whether the service ends.
const LOOK: Duration = Duration::from_millis(100);

/// What other processes may get.
#[derive(Debug, Default)]
pub(crate) struct Offer {
    pub(crate) model: Option<PathBuf>,
    pub(crate) adapter: Option<PathBuf>,
    pub(crate) checkpoint: Option<PathBuf>,
    pub(crate) training: Option<TokenRows>,
    pub(crate) validation: Option<TokenRows>,
}

/// A thread that answers questions until this is dropped.
pub(crate) struct FileService {
    offer: Arc<Mutex<Offer>>,
    /// The bytes of checkpoints that have arrived.
    arrived: Arc<AtomicU64>,
    /// Dropped to end the thread.
    alive: Option<Arc<()>>,
    thread: Option<JoinHandle<()>>,
}

impl FileService {
    /// Starts the thread. It puts parts of checkpoints into the folder `checkpoints`, which exists within `deadline` after the
    /// first part has come.
    ///
    /// # Errors
    /// Fails if the system cannot start a thread.
    pub(crate) fn start(
        channel: ByteChannel,
        offer: Offer,
        checkpoints: PathBuf,
        deadline: Duration,
    ) -> Result<Self, RunError> {
        let receiver = PartReceiver::new(checkpoints, deadline);
        let (offer, arrived, alive) = (Arc::new(Mutex::new(offer)), receiver.arrived(), Arc::new(()));
        let (offered, is_needed) = (offer.clone(), Arc::downgrade(&alive));
        let thread = std::thread::Builder::new().name("files".to_owned()).spawn(move || {
            let mut receiver = receiver;
            while is_needed.strong_count() > 0 {
                match channel.incoming().recv_timeout(LOOK) {
                    Ok((from, message)) => reply(&channel, &offered, &mut receiver, from, &message),
                    // The process has left the others.
                    Err(error) if error.is_disconnected() => return,
                    Err(_) => {}
                }
            }
        });
        let thread = thread.map_err(|error| RunError::new(ErrorKind::RankFailed, error))?;
        Ok(Self { offer, arrived, alive: Some(alive), thread: Some(thread) })
    }

    /// Returns the number of bytes of checkpoints that have arrived.
    pub(crate) fn arrived(&self) -> Arc<AtomicU64> {
        self.arrived.clone()
    }

    /// Changes what other processes may get.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Offer)) {
        change(&mut self.offer.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for FileService {
    fn drop(&mut self) {
        self.alive = None;
        if let Some(thread) = self.thread.take() {
            // The thread looks for its end again and again.
            let _ = thread.join();
        }
    }
}

/// Answers one message.
fn reply(
    channel: &ByteChannel,
    offer: &Mutex<Offer>,
    receiver: &mut PartReceiver,
    from: WorldRank,
    message: &[u8],
) {
    // The number of another message is not known, so no answer would count.
    let Some((Question { number, request }, bytes)) = decoded(message) else { return };
    let offer = || offer.lock().unwrap_or_else(PoisonError::into_inner);
    let answered = match request {
        Request::Rows { set, places } => {
            let rows = match set {
                RowSet::Training => offer().training.clone(),
                RowSet::Validation => offer().validation.clone(),
            };
            rows.ok_or_else(|| "the data is not open yet".to_owned())
                .and_then(|rows| read_rows(&rows, &places))
        }
        Request::Read { folder, name, offset, length } => {
            let folder = match folder {
                Folder::Model => offer().model.clone(),
                Folder::Adapter => offer().adapter.clone(),
                Folder::Checkpoint => offer().checkpoint.clone(),
            };
            folder
                .ok_or_else(|| "the run has no such folder".to_owned())
                .and_then(|folder| Ok((Answer::Bytes, read_file(&folder, &name, offset, length)?)))
        }
        Request::Keep { step, name, offset, of } => {
            let kept = receiver.keep(from, PartPiece { step, name: &name, offset, of, bytes });
            kept.map(|()| (Answer::Kept, Vec::new())).map_err(|error| sentence(&error))
        }
    };
    let (answer, bytes) = answered.unwrap_or_else(|reason| (Answer::Refused(reason), Vec::new()));
    channel.send(from, encoded(&Reply { number, answer }, &bytes));
}

/// Reads bytes of a file in a folder.
fn read_file(folder: &Path, name: &str, offset: u64, length: u64) -> Result<Vec<u8>, String> {
    let path = folder.join(name);
    if Path::new(name).file_name() != Some(name.as_ref()) || length > PIECE {
        return Err(format!("`{name}` is not the name of a file, or {length} bytes are too many"));
    }
    let mut bytes = vec![0; usize::try_from(length).map_err(|error| error.to_string())?];
    let read = File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, offset));
    read.map_err(|error| format!("{}: cannot be read: {error}", path.display()))?;
    Ok(bytes)
}

/// Reads rows.
fn read_rows(rows: &TokenRows, places: &[(usize, usize)]) -> Result<(Answer, Vec<u8>), String> {
    let places: Vec<RowPlace> = places.iter().map(|(source, row)| RowPlace::new(*source, *row)).collect();
    if !rows.has_places(&places) {
        return Err("the data has no such rows".to_owned());
    }
    let batch = rows.batch(&places).map_err(|error| sentence(&error))?;
    let TokenBatch { inputs, targets, rows, seq_len, side } = batch;
    let mut bytes = Vec::new();
    for numbers in [&inputs, &targets].into_iter().chain(side.iter().map(|side| &side.values)) {
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    }
    let side = side.into_iter().map(|side| SideShape { name: side.name, shape: side.shape }).collect();
    Ok((Answer::Rows { rows, seq_len, side }, bytes))
}
