//! [`Client`]: the questions of a process to the first one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
    heard: Mutex<Heard>,
}

/// The answers that the threads of a client have heard.
#[derive(Debug, Default)]
struct Heard {
    /// The answers that a thread has taken for another one.
    answers: BTreeMap<u64, (Answer, Vec<u8>)>,
    /// The time of the last answer to any question.
    last: Option<Instant>,
}

impl Client {
    /// Returns a client that gives up when it hears no answer to any question for the time `deadline`. On a slow network, an
    /// answer may take longer than that.
    pub(crate) fn new(channel: ByteChannel, deadline: Duration) -> Self {
        Self { channel, deadline, next: AtomicU64::new(0), heard: Mutex::default() }
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
    /// Returns why the first process refuses, or does not answer.
    pub(crate) fn wait(&self, number: u64) -> Result<(Answer, Vec<u8>), NoAnswer> {
        let since = Instant::now();
        loop {
            if let Some(answer) = self.take(number) {
                return answer;
            }
            let error = match self.channel.incoming().recv_timeout(LOOK) {
                Ok((_, message)) => {
                    self.note(&message);
                    continue;
                }
                Err(error) => error,
            };
            let reason = if !self.channel.is_open() || error.is_disconnected() {
                "the run has failed before the first process has answered".to_owned()
            } else if self.silence(since) >= self.deadline {
                format!(
                    "the first process has not answered for {:.0} s: look at its host and at the network between the two, or \
                     increase run.deadline_seconds",
                    self.deadline.as_secs_f64()
                )
            } else {
                continue;
            };
            // Another thread may have taken the answer meanwhile.
            return self.take(number).unwrap_or(Err(NoAnswer::Silent(reason)));
        }
    }

    /// Returns the answer to a question, if it has come.
    fn take(&self, number: u64) -> Option<Result<(Answer, Vec<u8>), NoAnswer>> {
        let (answer, bytes) = self.heard().answers.remove(&number)?;
        Some(match answer {
            Answer::Refused { reason, is_full: true } => Err(NoAnswer::Full(reason)),
            Answer::Refused { reason, is_full: false } => Err(NoAnswer::Refused(reason)),
            answer => Ok((answer, bytes)),
        })
    }

    fn note(&self, message: &[u8]) {
        let Some((Reply { number, answer }, bytes)) = decoded(message) else { return };
        let mut heard = self.heard();
        heard.last = Some(Instant::now());
        heard.answers.insert(number, (answer, bytes.to_vec()));
    }

    /// Returns how long no answer has come, counted from `since` at the earliest.
    fn silence(&self, since: Instant) -> Duration {
        self.heard().last.map_or(since, |last| last.max(since)).elapsed()
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a question has no answer with what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoAnswer {
    #[error("the first process: {0}")]
    Refused(String),
    /// Its disk is full.
    #[error("the first process: {0}")]
    Full(String),
    /// It does not answer, or the run has failed.
    #[error("{0}")]
    Silent(String),
}

impl NoAnswer {
    /// Returns the failure of a part of a checkpoint.
    fn of_part(self, path: &Path) -> CheckpointError {
        match self {
            Self::Refused(_) => CheckpointError::Refused(self.to_string()),
            Self::Full(_) => {
                let source = io::Error::new(io::ErrorKind::StorageFull, self);
                CheckpointError::Io { action: "send", path: path.to_owned(), source }
            }
            Self::Silent(reason) => CheckpointError::Unanswered(reason),
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
        loop {
            let length = PIECE.min(of - offset);
            let piece = &mut piece[..length as usize];
            file.read_exact(piece).map_err(failed)?;
            let number = self.0.send(Request::Keep { step, name: name.clone(), offset, of }, piece);
            // While one piece is written there, the next one travels.
            if let Some(earlier) = waiting.replace(number) {
                self.0.wait(earlier).map_err(|error| error.of_part(path))?;
            }
            sent.fetch_add(length, Ordering::Relaxed);
            offset += length;
            if offset >= of {
                break;
            }
        }
        // The first process leaves the others after this one, so it also answers the note that completes the checkpoint.
        waiting.map_or(Ok(()), |number| self.0.wait(number).map(drop)).map_err(|error| error.of_part(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_silence_counts_from_the_last_answer() {
        let client = Client::new(ByteChannel::group(1).remove(0), Duration::ZERO);
        let (since, pause) = (Instant::now(), Duration::from_millis(50));
        std::thread::sleep(pause);
        assert!(client.silence(since) >= pause);
        let answered = Instant::now();
        client.note(&encoded(&Reply { number: 7, answer: Answer::Kept }, &[]));
        let silence = client.silence(since);
        assert!(silence <= answered.elapsed(), "an answer to another question ends it");
        // The deadline is over, and another thread has taken the answer.
        assert!(matches!(client.wait(7), Ok((Answer::Kept, _))));
    }
}
