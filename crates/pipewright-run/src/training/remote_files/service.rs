//! [`FileService`]: answers in the first process what other processes ask about its files.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use pipewright::bounded_file::open_regular;
use pipewright::byte_channel::ByteChannel;
use pipewright::checkpoint::{PartArrivals, PartPiece, PartReceiver};
use pipewright::ids::WorldRank;
use pipewright::train::data::{RowPlace, TokenBatch, TokenRows};
use pipewright_schedule::error_text::with_causes as sentence;

use crate::error::{ErrorKind, RunError};
use crate::fault::is_full;
use crate::training::remote_files::message::{
    Answer, Folder, PIECE, Question, Reply, Request, RowSet, SideShape, decoded, encoded,
};
use crate::training::remote_files::pieces::Entry;

/// The time between two looks whether the service ends.
const LOOK: Duration = Duration::from_millis(100);

/// A folder with files that other processes may read.
#[derive(Debug)]
pub(crate) struct OfferedFolder {
    path: PathBuf,
    /// The names of the files, with the length and the time of the last change that they had at first.
    files: BTreeMap<String, (u64, Option<SystemTime>)>,
}

impl OfferedFolder {
    /// Offers these files of a folder.
    pub(crate) fn new(path: PathBuf, entries: &[Entry]) -> Self {
        let file = |entry: &Entry| {
            let changed = fs::metadata(path.join(&entry.name)).and_then(|found| found.modified());
            (entry.name.clone(), (entry.bytes, changed.ok()))
        };
        Self { files: entries.iter().map(file).collect(), path }
    }

    /// Reads bytes of a file.
    fn read(&self, name: &str, offset: u64, length: u64) -> Result<Vec<u8>, String> {
        let Some(declared) = self.files.get(name).filter(|_| length <= PIECE) else {
            return Err(format!("`{name}` is not a file of the run, or {length} bytes are too many"));
        };
        let path = self.path.join(name);
        let unreadable = |error| format!("{}: cannot be read: {error}", path.display());
        let file = open_regular(&path).map_err(unreadable)?;
        let found = file.metadata().map_err(unreadable)?;
        if (found.len(), found.modified().ok()) != *declared {
            return Err(format!(
                "{}: the file has changed since the run has begun: start again",
                path.display()
            ));
        }
        let mut bytes = vec![0; usize::try_from(length).map_err(|error| error.to_string())?];
        file.read_exact_at(&mut bytes, offset).map_err(unreadable)?;
        Ok(bytes)
    }
}

/// The files and the data that other processes may get.
#[derive(Debug, Default)]
pub(crate) struct Offer {
    pub(crate) model: Option<OfferedFolder>,
    pub(crate) adapter: Option<OfferedFolder>,
    pub(crate) checkpoint: Option<OfferedFolder>,
    pub(crate) training: Option<TokenRows>,
    pub(crate) validation: Option<TokenRows>,
}

/// A thread that answers questions until this is dropped.
pub(crate) struct FileService {
    offer: Arc<Mutex<Offer>>,
    /// The parts of checkpoints that arrive.
    arrivals: PartArrivals,
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
        let (offer, arrivals, alive) = (Arc::new(Mutex::new(offer)), receiver.arrivals(), Arc::new(()));
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
        Ok(Self { offer, arrivals, alive: Some(alive), thread: Some(thread) })
    }

    /// Returns the parts of checkpoints that arrive.
    pub(crate) fn arrivals(&self) -> PartArrivals {
        self.arrivals.clone()
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
    let refuse = |reason| Answer::Refused { reason, is_full: false };
    let answered = match request {
        Request::Rows { set, places } => {
            let rows = match set {
                RowSet::Training => offer().training.clone(),
                RowSet::Validation => offer().validation.clone(),
            };
            rows.ok_or_else(|| "the data is not open yet".to_owned())
                .and_then(|rows| read_rows(&rows, &places))
                .map_err(refuse)
        }
        Request::Read { folder, name, offset, length } => {
            let offer = offer();
            let folder = match folder {
                Folder::Model => &offer.model,
                Folder::Adapter => &offer.adapter,
                Folder::Checkpoint => &offer.checkpoint,
            };
            let folder = folder.as_ref().ok_or_else(|| "the run has no such folder".to_owned());
            let bytes = folder.and_then(|folder| folder.read(&name, offset, length));
            bytes.map(|bytes| (Answer::Bytes, bytes)).map_err(refuse)
        }
        Request::Keep { step, name, offset, of } => {
            let kept = receiver.keep(from, PartPiece { step, name: &name, offset, of, bytes });
            kept.map(|()| (Answer::Kept, Vec::new()))
                .map_err(|error| Answer::Refused { reason: sentence(&error), is_full: is_full(&error) })
        }
    };
    let (answer, bytes) = answered.unwrap_or_else(|refusal| (refusal, Vec::new()));
    channel.send(from, encoded(&Reply { number, answer }, &bytes));
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
