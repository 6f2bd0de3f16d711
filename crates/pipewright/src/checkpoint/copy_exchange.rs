//! [`CopyExchange`]: files of copies on their way from the memory of one machine to the memory of another
//! machine.
//!
//! A file is sent in pieces. The receiver confirms each piece when it is in its memory. The sender has at
//! most [`WINDOW`] pieces without a confirmation, so a slow receiver holds little in its queue. The receiver
//! writes under another name until the last piece has come. After its files, a process sends its part of the
//! manifest, which makes them count; each file is compared with its hash before it is used. An answer names
//! the piece or the part that it is for, so answers of a transfer that was given up do not count for the
//! next one.
//!
//! ```text
//! sender    Piece 0, Piece 1, ... Piece n          Part
//! receiver           Stored, Stored, ... Stored          Stored      or, at any place, Refused
//! ```
//!
//! All processes have the same roles: each receives on a thread of its own, which never waits for an answer.
//! So two processes that send to each other do not wait in a circle.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, select};
use pipewright_system::bounded_file::open_regular;
use serde::{Deserialize, Serialize};

use super::copy::{CopyFolder, WrittenPart};
use super::error::CheckpointError;
use super::piece_file::PieceFile;
use super::rank_file::split;
use crate::byte_channel::ByteChannel;
use crate::ids::WorldRank;

/// The bytes of a piece. A message of a rank waits for at most [`WINDOW`] of them.
const PIECE: usize = 1 << 20;

/// The largest number of pieces that the receiver has not confirmed.
const WINDOW: usize = 8;

/// The time between two looks whether the run has failed.
const LOOK: Duration = Duration::from_millis(20);

/// The content of a message, before the bytes of a piece.
#[derive(Debug, Serialize, Deserialize)]
enum Head {
    /// A piece of a file of `of` bytes.
    Piece { place: Place, of: u64 },
    /// The part of a process, whose text follows.
    Part { place: Place },
    /// A piece or a part is in the receiver's memory.
    Stored { place: Place },
    /// The receiver cannot hold a piece or a part.
    Refused { place: Place, reason: String },
}

/// The copy that a piece or a part belongs to, and its place there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    step: u64,
    /// The name of the file, or of the part.
    name: String,
    /// The first byte of a piece; 0 for a part.
    offset: u64,
}

/// The answer of a receiver.
type Answer = Result<(), String>;

/// Sends files of copies to other processes, and keeps the files that other processes send.
#[derive(Debug)]
pub struct CopyExchange {
    channel: ByteChannel,
    folder: CopyFolder,
    answers: Receiver<(WorldRank, Place, Answer)>,
    deadline: Duration,
    /// When a transfer that is under way fails; `None` if it has no limit.
    end: Option<Instant>,
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl CopyExchange {
    /// Starts the thread that keeps in `folder` what other processes send. One exchange at a time uses a
    /// channel. A receiver that confirms nothing for the whole `deadline` is an error.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn start(
        channel: ByteChannel,
        folder: CopyFolder,
        deadline: Duration,
    ) -> Result<Self, CheckpointError> {
        let (answered, answers) = crossbeam_channel::unbounded();
        let (stop, stopped) = crossbeam_channel::bounded(0);
        let (receiving, store) = (channel.clone(), folder.clone());
        let thread = std::thread::Builder::new().name("copies".to_owned());
        let thread = thread.spawn(move || receive(&receiving, store, &answered, &stopped));
        let thread = thread.map_err(CheckpointError::io("start a thread for", folder.path()))?;
        Ok(Self { channel, folder, answers, deadline, end: None, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the same exchange, in which a transfer that is under way at the time `end` fails.
    #[must_use]
    pub fn until(mut self, end: Instant) -> Self {
        self.end = Some(end);
        self
    }

    /// Sends a file of a copy to another process, and returns when that process has it. `written` counts the
    /// bytes.
    ///
    /// # Errors
    /// When the file cannot be read, or the other process cannot hold it or does not answer.
    pub fn send_file(
        &self,
        to: WorldRank,
        step: u64,
        name: &str,
        written: &AtomicU64,
    ) -> Result<(), CheckpointError> {
        let path = self.folder.file(step, name);
        let opened = open_regular(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (of, mut file) = opened.map_err(CheckpointError::io("read", &path))?;
        let place = |offset| Place { step, name: name.to_owned(), offset };
        // The offsets of the pieces without a confirmation.
        let (mut offset, mut waiting) = (0, VecDeque::new());
        while offset < of {
            if waiting.len() == WINDOW
                && let Some(first) = waiting.pop_front()
            {
                self.confirmed(to, &place(first))?;
            }
            let length = (of - offset).min(PIECE as u64);
            let head = Head::Piece { place: place(offset), of };
            let mut message = encoded(&head, length as usize);
            let start = message.len();
            message.resize(start + length as usize, 0);
            file.read_exact(&mut message[start..]).map_err(CheckpointError::io("read", &path))?;
            self.channel.send(to, message);
            written.fetch_add(length, Ordering::Relaxed);
            waiting.push_back(offset);
            offset += length;
        }
        waiting.into_iter().try_for_each(|offset| self.confirmed(to, &place(offset)))
    }

    /// Sends the files of a process and then its part of the manifest.
    pub(super) fn send_part(
        &self,
        to: WorldRank,
        step: u64,
        part: &WrittenPart,
        written: &Arc<AtomicU64>,
    ) -> Result<(), CheckpointError> {
        part.files.iter().try_for_each(|name| self.send_file(to, step, name, written))?;
        let place = Place { step, name: part.name.clone(), offset: 0 };
        let mut message = encoded(&Head::Part { place: place.clone() }, part.text.len());
        message.extend_from_slice(part.text.as_bytes());
        self.channel.send(to, message);
        self.confirmed(to, &place)
    }

    /// Waits until a receiver has confirmed the piece or the part at `expected`.
    fn confirmed(&self, from: WorldRank, expected: &Place) -> Result<(), CheckpointError> {
        let since = Instant::now();
        loop {
            if self.end.is_some_and(|end| Instant::now() >= end) {
                let reason = format!("the transfer of a copy to rank {from} takes too long");
                return Err(CheckpointError::Refused(reason));
            }
            match self.answers.recv_timeout(LOOK) {
                Ok((rank, place, answer)) if rank == from && place == *expected => {
                    return answer.map_err(|reason| {
                        CheckpointError::Refused(format!(
                            "rank {from} cannot hold a part of a copy: {reason}"
                        ))
                    });
                }
                // It is for an earlier transfer, which was given up.
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let reason = "the thread that receives copies has ended early";
                    return Err(CheckpointError::unusable(self.folder.path(), reason));
                }
                Err(RecvTimeoutError::Timeout) if !self.channel.is_open() => {
                    return Err(CheckpointError::CopyAbandoned { rank: from });
                }
                Err(RecvTimeoutError::Timeout) if since.elapsed() >= self.deadline => {
                    let waited = self.deadline.as_secs_f64();
                    let reason = format!("rank {from} has confirmed nothing of a copy for {waited:.1} s");
                    return Err(CheckpointError::Refused(reason));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Drop for CopyExchange {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Keeps what other processes send, and passes their answers on, until `stopped`.
fn receive(
    channel: &ByteChannel,
    folder: CopyFolder,
    answered: &Sender<(WorldRank, Place, Answer)>,
    stopped: &Receiver<()>,
) {
    let mut store = Store { folder, open: HashMap::new() };
    loop {
        let (from, message) = select! {
            recv(channel.incoming()) -> message => match message {
                Ok(message) => message,
                Err(_) => return,
            },
            recv(stopped) -> _ => return,
        };
        let (place, kept) = match decoded(&message) {
            Some((Head::Stored { place }, _)) => {
                // If the exchange was dropped, no thread waits for the answer.
                let _ = answered.send((from, place, Ok(())));
                continue;
            }
            Some((Head::Refused { place, reason }, _)) => {
                let _ = answered.send((from, place, Err(reason)));
                continue;
            }
            Some((Head::Piece { place, of }, bytes)) => {
                let kept = store.keep_piece(from, place.step, &place.name, (place.offset, of), bytes);
                (place, kept)
            }
            Some((Head::Part { place }, text)) => {
                let kept = store.keep_part(place.step, &place.name, text);
                (place, kept)
            }
            // Its place is not known, so no answer would count. The sender stops at its deadline.
            None => continue,
        };
        let answer = match kept {
            Ok(()) => Head::Stored { place },
            Err(reason) => Head::Refused { place, reason },
        };
        channel.send(from, encoded(&answer, 0));
    }
}

/// The files that come from other processes.
struct Store {
    folder: CopyFolder,
    /// The file that each process is sending, with its step and name.
    open: HashMap<WorldRank, (u64, String, Incoming)>,
}

/// A file that has arrived in part.
enum Incoming {
    Open(PieceFile),
    /// A piece could not be kept, so the others do not count.
    GivenUp,
}

impl Store {
    /// Keeps a piece of a file, which begins at the `offset` of so many bytes. The pieces come in any order.
    fn keep_piece(
        &mut self,
        from: WorldRank,
        step: u64,
        name: &str,
        (offset, of): (u64, u64),
        bytes: &[u8],
    ) -> Answer {
        if split(name).is_none() {
            return Err(format!("`{name}` is not the name of a file of a copy"));
        }
        let kept = self.write_piece(from, step, name, (offset, of), bytes);
        match &kept {
            Ok(true) => drop(self.open.remove(&from)),
            Ok(false) => {}
            Err(_) => {
                self.open.insert(from, (step, name.to_owned(), Incoming::GivenUp));
                self.folder.drop_draft(step, name);
            }
        }
        kept.map(drop)
    }

    /// Writes a piece, and gives the file its name when it is whole. Returns whether it is.
    fn write_piece(
        &mut self,
        from: WorldRank,
        step: u64,
        name: &str,
        (offset, of): (u64, u64),
        bytes: &[u8],
    ) -> Result<bool, String> {
        let open = match self.open.entry(from) {
            Entry::Occupied(open) if (open.get().0, &*open.get().1) == (step, name) => open.into_mut(),
            entry => {
                let file = self.folder.create_draft(step, name).map_err(|error| error.to_string())?;
                let file = Incoming::Open(PieceFile::in_memory(file));
                entry.insert_entry((step, name.to_owned(), file)).into_mut()
            }
        };
        let Incoming::Open(file) = &mut open.2 else {
            return Err("an earlier piece of the file could not be kept".to_owned());
        };
        let is_whole = file.put(offset, of, bytes).map_err(|error| {
            CheckpointError::io("write", &self.folder.file(step, name))(error).to_string()
        })?;
        if is_whole {
            self.folder.keep_draft(step, name).map_err(|error| error.to_string())?;
        }
        Ok(is_whole)
    }

    fn keep_part(&self, step: u64, name: &str, text: &[u8]) -> Answer {
        if split(name).is_none() {
            return Err(format!("`{name}` is not the name of a part of a copy"));
        }
        let text = std::str::from_utf8(text).map_err(|error| error.to_string())?;
        self.folder.put_received(step, name, text).map_err(|error| error.to_string())
    }
}

/// Returns a head with its length in front, and with room for so many bytes after it.
fn encoded(head: &Head, room: usize) -> Vec<u8> {
    let head = postcard::to_stdvec(head).expect("a head has nothing that postcard cannot write");
    let length = u32::try_from(head.len()).expect("a head is small");
    let mut message = Vec::with_capacity(4 + head.len() + room);
    message.extend_from_slice(&length.to_le_bytes());
    message.extend_from_slice(&head);
    message
}

/// Returns the head of a message and the bytes after it.
fn decoded(message: &[u8]) -> Option<(Head, &[u8])> {
    let (length, rest) = message.split_first_chunk::<4>()?;
    let (head, bytes) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    Some((postcard::from_bytes(head).ok()?, bytes))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const STEP: u64 = 7;
    const NAME: &str = "rank-0000.safetensors";
    const TO: WorldRank = WorldRank::new(1);

    /// The deadline of a transfer that is given up.
    const BRIEF: Duration = Duration::from_millis(200);

    /// Two processes, each with a folder.
    struct Pair {
        _scratch: tempfile::TempDir,
        folders: [CopyFolder; 2],
        channels: Vec<ByteChannel>,
    }

    fn pair() -> Pair {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let folder = |name| CopyFolder::create(&scratch.path().join(name)).expect("a folder");
        let folders = [folder("a"), folder("b")];
        Pair { folders, channels: ByteChannel::group(2), _scratch: scratch }
    }

    impl Pair {
        fn start(&self, index: usize) -> CopyExchange {
            self.start_until(index, Duration::from_secs(60))
        }

        fn start_until(&self, index: usize, deadline: Duration) -> CopyExchange {
            let (channel, folder) = (self.channels[index].clone(), self.folders[index].clone());
            CopyExchange::start(channel, folder, deadline).expect("a thread")
        }

        /// Writes a file of so many bytes in the first folder, and returns its content.
        fn write(&self, length: usize) -> Vec<u8> {
            let content: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
            drop(self.folders[0].create_draft(STEP, NAME).expect("a file"));
            fs::write(self.folders[0].file(STEP, NAME), &content).expect("a file");
            content
        }
    }

    fn send(exchange: &CopyExchange) -> Result<u64, CheckpointError> {
        let written = AtomicU64::new(0);
        exchange.send_file(TO, STEP, NAME, &written).map(|()| written.into_inner())
    }

    #[test]
    fn a_file_of_many_pieces_arrives() {
        for length in [1, PIECE, 3 * PIECE + 5, 20 * PIECE] {
            let pair = pair();
            let content = pair.write(length);
            let [sender, _receiver] = [0, 1].map(|index| pair.start(index));
            assert_eq!(send(&sender).expect("it arrives"), length as u64);
            assert!(fs::read(pair.folders[1].file(STEP, NAME)).expect("the file") == content);
        }
    }

    #[test]
    fn both_send_at_the_same_time() {
        let pair = pair();
        pair.write(30 * PIECE);
        drop(pair.folders[1].create_draft(STEP, "rank-0001.safetensors").expect("a file"));
        fs::write(pair.folders[1].file(STEP, "rank-0001.safetensors"), vec![3; 30 * PIECE]).expect("a file");
        let [first, second] = [0, 1].map(|index| pair.start(index));
        std::thread::scope(|scope| {
            scope.spawn(|| send(&first).expect("it arrives"));
            let written = AtomicU64::new(0);
            let sent = second.send_file(WorldRank::new(0), STEP, "rank-0001.safetensors", &written);
            sent.expect("it arrives");
        });
        assert!(pair.folders[0].file(STEP, "rank-0001.safetensors").exists());
        assert!(pair.folders[1].file(STEP, NAME).exists());
    }

    #[test]
    fn a_receiver_that_does_not_answer_is_given_up() {
        let pair = pair();
        pair.write(PIECE);
        let error = send(&pair.start_until(0, BRIEF)).expect_err("nobody receives");
        assert!(error.to_string().starts_with(&format!("rank {TO} has confirmed nothing")), "{error}");
    }

    #[test]
    fn an_answer_of_an_earlier_transfer_does_not_count() {
        let pair = pair();
        pair.write(PIECE);
        let place = Place { step: STEP - 1, name: NAME.to_owned(), offset: 0 };
        pair.channels[1].send(WorldRank::new(0), encoded(&Head::Stored { place }, 0));
        let error = send(&pair.start_until(0, BRIEF)).expect_err("the answer is for another step");
        assert!(error.to_string().starts_with(&format!("rank {TO} has confirmed nothing")), "{error}");
    }

    #[test]
    fn a_transfer_ends_at_its_limit() {
        let pair = pair();
        pair.write(PIECE);
        let error = send(&pair.start(0).until(Instant::now())).expect_err("no time is left");
        assert_eq!(error.to_string(), format!("the transfer of a copy to rank {TO} takes too long"));
    }

    #[test]
    fn a_receiver_whose_folder_is_gone_refuses() {
        let pair = pair();
        pair.write(PIECE);
        let [sender, _receiver] = [0, 1].map(|index| pair.start(index));
        fs::remove_dir_all(pair.folders[1].path()).expect("the folder");
        let error = send(&sender).expect_err("no folder");
        assert!(error.to_string().starts_with(&format!("rank {TO} cannot hold a part")), "{error}");
    }

    #[test]
    fn pieces_come_in_any_order_and_foreign_ones_end_the_file() {
        let pair = pair();
        let mut store = Store { folder: pair.folders[0].clone(), open: HashMap::new() };
        let mut keep =
            |step, name: &str, offset| store.keep_piece(TO, step, name, (offset, 4), &[1, 2]).is_ok();
        assert!(keep(STEP, NAME, 2) && keep(STEP, NAME, 0), "a short message overtakes a long one");
        let path = |step| pair.folders[0].file(step, NAME);
        assert_eq!(fs::read(path(STEP)).expect("the file"), [1, 2, 1, 2]);
        assert!(keep(STEP + 1, NAME, 0) && !keep(STEP + 1, NAME, 0x100));
        assert!(!keep(STEP + 1, NAME, 2) && !path(STEP + 1).exists(), "the file was given up");
        assert!(!keep(STEP, "../rank-0000.safetensors", 0) && !keep(STEP, "lock", 0));
        assert!(keep(STEP + 2, NAME, 0) && keep(STEP + 2, NAME, 2));
        assert_eq!(fs::read(path(STEP + 2)).expect("the file"), [1, 2, 1, 2]);
    }
}
