//! The byte format of frames between processes: a small head, then the elements of tensors.
//!
//! ```text
//! format (u32) | head's length (u32) | head (postcard) | pad | elements of tensor 0 | pad | elements of tensor 1 | pad ...
//! ```
//!
//! The format tells frames of this version of the program from frames of other versions, so that no process
//! acts on a frame that it would misread.
//!
//! Every part starts at a multiple of [`BLOCK`], and the size of a frame is a multiple of it. MPI counts
//! blocks instead of bytes, so a frame may exceed 2^31 bytes. Elements are in the machine's byte order: all
//! machines of a run have the same.

use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, TensorData};
use pipewright_schedule::{Action, StageIndex};
use serde::{Deserialize, Serialize};

use super::clock::Nanos;
use crate::failure::{Cause, FailureNotice, NotFiniteOrigin, StepError, UpdateFailure};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::message::{Message, Payload, Tag};
use crate::progress::Heartbeat;
use crate::tensor::layout::Layout;
use crate::tensor::{OptionalTensors, Value};
use crate::verification::{Difference, Suspicion};

/// Parts of a frame are padded to multiples of this many bytes.
pub(crate) const BLOCK: usize = 64;

/// The first bytes of every frame. A change of the heads, or of what processes do with frames, changes it.
const FORMAT: [u8; 4] = *b"pw 7";
/// The number of bytes before the head.
const PREFIX: usize = 8;

/// A frame from one process to another.
#[derive(Debug)]
pub(crate) enum Frame {
    /// A message for a rank.
    Message(Message),
    /// A step failed.
    Failed(FailureNotice),
    /// The progress of all ranks, as far as the sender knows.
    Heartbeats(Vec<Heartbeat>),
    /// The sender's process.
    Process(ProcessId),
    /// The size of the receives that the sender has posted for the boundary messages of the receiver.
    Room {
        /// The size of each in bytes.
        bytes: usize,
    },
    /// A message of bytes that belongs to no step.
    Bytes(Vec<u8>),
    /// A message of the exchange of reports between processes whose ranks have begun the next step.
    Reports(Vec<u8>),
    /// A message about files that another host does not have.
    Files(Vec<u8>),
    /// A question for the first process's time.
    ClockRequest {
        /// The sender's time.
        sent: Nanos,
    },
    /// The answer to it.
    ClockAnswer {
        /// The time in the request.
        sent: Nanos,
        /// The time of the process that answers.
        answered: Nanos,
    },
}

/// The current time: of this process, and on the clock that all processes share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub here: Instant,
    pub common: Nanos,
}

/// A process. Its number is meaningful on one machine, among processes that can see each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub machine: String,
    pub number: u32,
}

/// Why bytes are not a frame.
#[derive(thiserror::Error)]
pub(crate) enum WireError {
    /// The frame has another format.
    #[error(
        "rank {from} sends frames that begin with `{}`, and frames of this process begin with `{}`: the ranks run different \
         versions of the program; install the same version on every host",
        .found.escape_ascii(),
        FORMAT.escape_ascii()
    )]
    Format {
        /// The sender.
        from: WorldRank,
        /// The first bytes of its frame.
        found: [u8; 4],
    },
    /// The head cannot be decoded.
    #[error("a frame from rank {from} has a head that cannot be decoded: {source}")]
    Head {
        /// The sender.
        from: WorldRank,
        /// The decoder's error.
        source: postcard::Error,
    },
    /// The frame is shorter than its head says.
    #[error("a frame from rank {from} has {found} bytes, but its head says {expected}")]
    Short {
        /// The sender.
        from: WorldRank,
        /// Bytes that arrived.
        found: usize,
        /// Bytes that the head says.
        expected: usize,
    },
    /// The elements are not a tensor.
    #[error("a frame from rank {from} has a tensor that cannot be decoded: {reason}")]
    Tensor {
        /// The sender.
        from: WorldRank,
        /// The decoder's error.
        reason: String,
    },
}

pipewright_schedule::message_as_debug!(WireError);

#[derive(Serialize, Deserialize)]
enum Head {
    Message {
        attempt: Attempt,
        tag: Tag,
        /// On the common clock.
        sent: Nanos,
        payload: PayloadHead,
    },
    Failed {
        attempt: Attempt,
        stops_all: bool,
        diverged: Option<StepNumber>,
        rank: WorldRank,
        step: StepNumber,
        action: Option<String>,
        cause: CauseHead,
    },
    Heartbeats(Vec<Heartbeat>),
    Process(ProcessId),
    Room {
        bytes: usize,
    },
    /// The number of bytes that follow.
    Bytes {
        length: usize,
    },
    ClockRequest {
        sent: Nanos,
    },
    ClockAnswer {
        sent: Nanos,
        answered: Nanos,
    },
    /// The number of bytes that follow.
    Reports {
        length: usize,
    },
    /// The number of bytes that follow.
    Files {
        length: usize,
    },
}

#[derive(Serialize, Deserialize)]
enum PayloadHead {
    Tensors(Vec<Option<TensorHead>>),
    Bytes(Vec<u8>),
}

#[derive(Serialize, Deserialize)]
struct TensorHead {
    shape: Vec<usize>,
    dtype: DType,
    requires_grad: bool,
    layout: Option<Layout>,
}

/// A cause for another process: its message, which peer is lost, which stage's update failed, whose mistake
/// it is, and why the step is repeated.
#[derive(Serialize, Deserialize)]
enum CauseHead {
    Build(String),
    LostPeer(WorldRank),
    SilentPeer { peer: WorldRank, waited: Duration, report: String },
    Update { stage: StageIndex, message: String },
    Transport(String),
    WrongInput(String),
    Suspicious(Suspicion),
    Unconfirmed(Box<Difference>),
    Search(Box<NotFiniteOrigin>),
    Number(String),
    Other(String),
}

/// Writes the encoding of `frame`, which is sent at `now`, into `buffer`, and replaces its content.
pub(crate) fn encode(frame: Frame, now: Moment, buffer: &mut Vec<u8>) {
    buffer.clear();
    let (head, tensors) = match frame {
        Frame::Message(message) => message_head(message, now),
        Frame::Failed(notice) => (failure_head(notice), Vec::new()),
        Frame::Heartbeats(heartbeats) => (Head::Heartbeats(heartbeats), Vec::new()),
        Frame::Process(process) => (Head::Process(process), Vec::new()),
        Frame::Room { bytes } => (Head::Room { bytes }, Vec::new()),
        Frame::Bytes(bytes) => (Head::Bytes { length: bytes.len() }, content_of(bytes)),
        Frame::Reports(bytes) => (Head::Reports { length: bytes.len() }, content_of(bytes)),
        Frame::Files(bytes) => (Head::Files { length: bytes.len() }, content_of(bytes)),
        Frame::ClockRequest { sent } => (Head::ClockRequest { sent }, Vec::new()),
        Frame::ClockAnswer { sent, answered } => (Head::ClockAnswer { sent, answered }, Vec::new()),
    };
    let head = postcard::to_stdvec(&head).expect("a head has nothing that postcard cannot write");
    let length = u32::try_from(head.len()).expect("a head is small");
    buffer.extend_from_slice(&FORMAT);
    buffer.extend_from_slice(&length.to_le_bytes());
    buffer.extend_from_slice(&head);
    pad(buffer);
    for tensor in tensors {
        buffer.extend_from_slice(tensor.as_bytes());
        pad(buffer);
    }
}

/// Decodes a frame that [`encode`] wrote and that arrives `now`; tensors are made on the CPU.
pub(crate) fn decode(from: WorldRank, bytes: &[u8], now: Moment) -> Result<Frame, WireError> {
    let short = |expected| WireError::Short { from, found: bytes.len(), expected };
    let content = |end: usize, length| {
        let start = end.next_multiple_of(BLOCK);
        let content = start.checked_add(length).and_then(|end| bytes.get(start..end));
        content.map(<[u8]>::to_vec).ok_or(short(start.saturating_add(length)))
    };
    let found = *bytes.first_chunk().ok_or(short(PREFIX))?;
    if found != FORMAT {
        return Err(WireError::Format { from, found });
    }
    let length = bytes[FORMAT.len()..].first_chunk().ok_or(short(PREFIX))?;
    let end = PREFIX + u32::from_le_bytes(*length) as usize;
    let head = bytes.get(PREFIX..end).ok_or(short(end))?;
    let head = postcard::from_bytes(head).map_err(|source| WireError::Head { from, source })?;
    Ok(match head {
        Head::Heartbeats(heartbeats) => Frame::Heartbeats(heartbeats),
        Head::Process(process) => Frame::Process(process),
        Head::Room { bytes } => Frame::Room { bytes },
        Head::Bytes { length } => Frame::Bytes(content(end, length)?),
        Head::Reports { length } => Frame::Reports(content(end, length)?),
        Head::Files { length } => Frame::Files(content(end, length)?),
        Head::ClockRequest { sent } => Frame::ClockRequest { sent },
        Head::ClockAnswer { sent, answered } => Frame::ClockAnswer { sent, answered },
        Head::Failed { attempt, stops_all, diverged, rank, step, action, cause } => {
            // An action that cannot be decoded comes from another version; the failure itself matters more.
            let action = action.and_then(|text| text.parse::<Action>().ok());
            let error = StepError { rank, step, action, cause: cause.into() };
            Frame::Failed(FailureNotice { error, attempt, stops_all, diverged })
        }
        Head::Message { attempt, tag, sent, payload } => {
            let payload = match payload {
                PayloadHead::Tensors(heads) => {
                    Payload::Tensors(tensors(from, heads, bytes, end.next_multiple_of(BLOCK))?)
                }
                PayloadHead::Bytes(bytes) => Payload::Bytes(bytes.into()),
            };
            let sent = now.instant_of(sent);
            Frame::Message(Message { from, attempt, tag, payload, sent, arrived: sent })
        }
    })
}

/// Returns bytes as the content that follows a head.
fn content_of(bytes: Vec<u8>) -> Vec<TensorData> {
    let length = bytes.len();
    vec![TensorData::from_bytes_vec(bytes, [length], DType::U8)]
}

fn message_head(message: Message, now: Moment) -> (Head, Vec<TensorData>) {
    let mut elements = Vec::new();
    let payload = match message.payload {
        Payload::Tensors(tensors) => PayloadHead::Tensors(
            tensors
                .into_iter()
                .map(|tensor| {
                    let tensor = tensor?;
                    let (requires_grad, layout) = (tensor.requires_grad(), tensor.layout().cloned());
                    let data = tensor.into_data();
                    let (shape, dtype) = (data.shape().to_vec(), data.dtype());
                    let head = TensorHead { shape, dtype, requires_grad, layout };
                    elements.push(data);
                    Some(head)
                })
                .collect(),
        ),
        Payload::Bytes(bytes) => PayloadHead::Bytes(bytes.to_vec()),
    };
    (Head::Message { attempt: message.attempt, tag: message.tag, sent: now.common, payload }, elements)
}

fn failure_head(FailureNotice { error, attempt, stops_all, diverged }: FailureNotice) -> Head {
    let cause = match &error.cause {
        Cause::Build { message } => CauseHead::Build(message.clone()),
        Cause::LostPeer { peer } => CauseHead::LostPeer(*peer),
        Cause::SilentPeer { peer, waited, report } => {
            CauseHead::SilentPeer { peer: *peer, waited: *waited, report: report.clone() }
        }
        Cause::Update { stage, failure } => CauseHead::Update { stage: *stage, message: failure.to_string() },
        Cause::Transport { message } => CauseHead::Transport(message.clone()),
        Cause::WrongInput { message } => CauseHead::WrongInput(message.clone()),
        Cause::Suspicious { suspicion } => CauseHead::Suspicious(suspicion.clone()),
        Cause::Unconfirmed { difference } => CauseHead::Unconfirmed(difference.clone()),
        Cause::Search { origin } => CauseHead::Search(origin.clone()),
        cause if cause.is_number() => CauseHead::Number(cause.to_string()),
        cause => CauseHead::Other(cause.to_string()),
    };
    let action = error.action.map(|action| action.to_string());
    Head::Failed { attempt, stops_all, diverged, rank: error.rank, step: error.step, action, cause }
}

impl From<CauseHead> for Cause {
    fn from(head: CauseHead) -> Self {
        match head {
            CauseHead::Build(message) => Self::Build { message },
            CauseHead::LostPeer(peer) => Self::LostPeer { peer },
            CauseHead::SilentPeer { peer, waited, report } => Self::SilentPeer { peer, waited, report },
            CauseHead::Update { stage, message } => {
                Self::Update { stage, failure: UpdateFailure::Remote { message } }
            }
            CauseHead::Transport(message) => Self::Transport { message },
            CauseHead::WrongInput(message) => Self::WrongInput { message },
            CauseHead::Suspicious(suspicion) => Self::Suspicious { suspicion },
            CauseHead::Unconfirmed(difference) => Self::Unconfirmed { difference },
            CauseHead::Search(origin) => Self::Search { origin },
            CauseHead::Number(message) => Self::RemoteNumber { message },
            CauseHead::Other(message) => Self::Remote { message },
        }
    }
}

fn tensors(
    from: WorldRank,
    heads: Vec<Option<TensorHead>>,
    bytes: &[u8],
    mut at: usize,
) -> Result<OptionalTensors, WireError> {
    let read = |head: Option<TensorHead>| {
        let Some(TensorHead { shape, dtype, requires_grad, layout }) = head else { return Ok(None) };
        let elements = shape.iter().try_fold(dtype.size(), |bytes, &size| bytes.checked_mul(size));
        let end = elements.and_then(|length| at.checked_add(length));
        let end = end.filter(|&end| end <= bytes.len());
        let expected = elements.map_or(usize::MAX, |length| at.saturating_add(length));
        let short = WireError::Short { from, found: bytes.len(), expected };
        let elements = bytes.get(at..end.ok_or(short)?).unwrap_or_default().to_vec();
        at = (at + elements.len()).next_multiple_of(BLOCK);
        let data = TensorData::try_from_bytes_vec(elements, shape, dtype);
        let data = data.map_err(|error| WireError::Tensor { from, reason: format!("{error:?}") })?;
        let value = Value::from_data(data, &Device::flex());
        let value = if requires_grad { value } else { value.constant() };
        Ok(Some(match layout {
            Some(layout) => value.with_layout(layout),
            None => value,
        }))
    };
    heads.into_iter().map(read).collect()
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
}

impl Moment {
    /// Converts a time on the common clock to an instant of this process, which is never later than the
    /// current one.
    fn instant_of(self, common: Nanos) -> Instant {
        let age = Duration::from_nanos(self.common.saturating_sub(common).try_into().unwrap_or(0));
        self.here.checked_sub(age).unwrap_or(self.here)
    }
}

#[cfg(test)]
mod tests;
