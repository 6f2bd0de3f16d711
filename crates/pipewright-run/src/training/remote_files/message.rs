//! The questions of a process to the first one, and the answers. A message is a JSON text with its length in front, and
//! bytes after it.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The most bytes of a file in one message.
pub(crate) const PIECE: u64 = 1 << 20;

/// A question. Its answer has the same number.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Question {
    pub(crate) number: u64,
    pub(crate) request: Request,
}

/// The content of a question.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Rows of the data, each as the index of its source and its number there.
    Rows { set: RowSet, places: Vec<(usize, usize)> },
    /// Bytes of a file, at most [`PIECE`].
    Read { folder: Folder, name: String, offset: u64, length: u64 },
    /// A piece of a file of a checkpoint, whose bytes follow.
    Keep { step: u64, name: String, offset: u64, of: u64 },
}

/// Rows that a run uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RowSet {
    Training,
    Validation,
}

/// A folder of the first process whose files others may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Folder {
    /// The model that the settings name.
    Model,
    /// The adapters that the settings name.
    Adapter,
    /// The checkpoint from which the run resumes.
    Checkpoint,
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reply {
    pub(crate) number: u64,
    pub(crate) answer: Answer,
}

/// The content of an answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// Rows. Their inputs, their targets and their side inputs follow, as numbers of four bytes.
    Rows { rows: usize, seq_len: usize, side: Vec<SideShape> },
    /// Bytes of a file, which follow.
    Bytes,
    /// A piece of a checkpoint is kept.
    Kept,
    /// The first process cannot do it, perhaps because its disk `is_full`.
    Refused { reason: String, is_full: bool },
}

/// A side input.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SideShape {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
}

/// Returns a message.
pub(crate) fn encoded(head: &impl Serialize, bytes: &[u8]) -> Vec<u8> {
    let head = serde_json::to_vec(head).expect("a head is plain data");
    let mut message = Vec::with_capacity(8 + head.len() + bytes.len());
    message.extend_from_slice(&(head.len() as u64).to_le_bytes());
    message.extend_from_slice(&head);
    message.extend_from_slice(bytes);
    message
}

/// Returns the head of a message, and the bytes after it.
pub(crate) fn decoded<T: DeserializeOwned>(message: &[u8]) -> Option<(T, &[u8])> {
    let (length, rest) = message.split_first_chunk::<8>()?;
    let (head, bytes) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    Some((serde_json::from_slice(head).ok()?, bytes))
}
