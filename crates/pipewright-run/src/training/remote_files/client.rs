//! [`Client`]: the questions of a process to the first one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pipewright::byte_channel::ByteChannel;
use pipewright::checkpoint::{CheckpointError, PartSender};
use pipewright::ids::WorldRank;

use crate::training::remote_files::message::{Answer, PIECE, Question, Reply, Request, decoded, encoded};

/// The process that answers.
const FIRST: WorldRank = WorldRank::new(0);

/// The time between two looks at the answers.
const LOOK: Duration = Duration::from_millis(5);

/// The connection of a process to the service of the first one. Several threads may ask at the same time.
#[derive(Debug)]
pub(crate) struct Client {
    channel: ByteChannel,
    deadline: Duration,
    next: AtomicU64,
    /// The answers that a thread has taken for another one.
    taken: Mutex<BTreeMap<u64, (Answer, Vec<u8>)>>,
}

impl Client {
    /// Returns a client that waits for each answer until `deadline`.
    pub(crate) fn new(channel: ByteChannel, deadline: Duration) -> Self {
        Self { channel, deadline, next: AtomicU64::new(0), taken: Mutex::default() }
    }

    /// Sends a question with bytes, and returns its number.
    pub(crate) fn send(&self, request: Request, bytes: &[u8]) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.channel.send(FIRST, encoded(&Question { number, request }, bytes));
        number
    }

    /// Waits for the answer to the question with this number.
    ///
    /// # Errors
    /// Returns a sentence if the first process refuses, or does not answer.
    pub(crate) fn wait(&self, number: u64) -> Result<(Answer, Vec<u8>), String> {
        let since = Instant::now();
        loop {
            let taken = || self.taken.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((answer, bytes)) = taken().remove(&number) {
                return match answer {
                    Answer::Refused(reason) => Err(format!("the first process: {reason}")),
                    answer => Ok((answer, bytes)),
                };
            }
            let received = self.channel.incoming().recv_timeout(LOOK);
            if let Ok((_, message)) = &received {
                if let Some((Reply { number, answer }, bytes)) = decoded(message) {
                    taken().insert(number, (answer, bytes.to_vec()));
                }
                continue;
            }
            if !self.channel.is_open() || received.is_err_and(|error| error.is_disconnected()) {
                return Err("the run has failed before the first process has answered".to_owned());
            }
            if since.elapsed() >= self.deadline {
                return Err(format!(
                    "the first process has not answered for {:.0} s: look at its host and at the network between the two, or \
                     increase run.deadline_seconds",
                    self.deadline.as_secs_f64()
                ));
            }
        }
    }
}

/// Sends parts of checkpoints to the first process.
pub(crate) struct Upload(pub(crate) Arc<Client>);

impl PartSender for Upload {
    fn send(&self, step: u64, path: &Path, sent: &AtomicU64) -> Result<(), CheckpointError> {
        let failed = |source| CheckpointError::Io { action: "read", path: path.to_owned(), source };
        let mut file = File::open(path).map_err(failed)?;
        let of = file.metadata().map_err(failed)?.len();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut piece = vec![0; PIECE.min(of) as usize];
        let (mut offset, mut waiting) = (0, None);
        while offset < of {
            let length = PIECE.min(of - offset);
            let piece = &mut piece[..length as usize];
            file.read_exact(piece).map_err(failed)?;
            let number = self.0.send(Request::Keep { step, name: name.clone(), offset, of }, piece);
            // While one piece is written there, the next one travels.
            if let Some(earlier) = waiting.replace(number) {
                self.0.wait(earlier).map_err(CheckpointError::Refused)?;
            }
            sent.fetch_add(length, Ordering::Relaxed);
            offset += length;
        }
        // With the note of the last rank, the first process may complete the checkpoint and leave before its answer is
        // sent. If it cannot keep a note, it reports that by itself.
        if name.ends_with(".note") {
            return Ok(());
        }
        waiting.map_or(Ok(()), |number| self.0.wait(number).map(drop)).map_err(CheckpointError::Refused)
    }
}
