//! The byte format of frames between processes: a small head, then the elements of tensors.
//!
//! ```text
//! head's length (u32) | head (postcard) | pad | elements of tensor 0 | pad | elements of tensor 1 | pad ...
//! ```
//!
//! Every part starts at a multiple of [`BLOCK`], and the size of a frame is a multiple of it. MPI counts blocks instead of
//! bytes, so a frame may exceed 2^31 bytes. Elements are in the machine's byte order: all machines of a run have the same.

use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, TensorData};
use pipewright_schedule::Action;
use serde::{Deserialize, Serialize};

use super::clock::Nanos;
use crate::failure::{Cause, FailureNotice, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::message::{Message, Payload, Tag};
use crate::progress::Heartbeat;
use crate::tensor::{OptionalTensors, Value};

/// Parts of a frame are padded to multiples of this many bytes.
pub(crate) const BLOCK: usize = 64;

/// What one process sends to another.
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
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    /// The head cannot be decoded.
    #[error("a frame from rank {from} has a head that cannot be decoded: {source}")]
    Head {
        /// The sender.
        from: WorldRank,
        /// What is wrong.
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
        /// What is wrong.
        reason: String,
    },
}

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
        diverged: Option<StepNumber>,
        rank: WorldRank,
        step: StepNumber,
        action: Option<String>,
        cause: CauseHead,
    },
    Heartbeats(Vec<Heartbeat>),
    Process(ProcessId),
    ClockRequest {
        sent: Nanos,
    },
    ClockAnswer {
        sent: Nanos,
        answered: Nanos,
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
}

/// A cause for another process: its message, and which peer is lost.
#[derive(Serialize, Deserialize)]
enum CauseHead {
    Build(String),
    LostPeer(WorldRank),
    SilentPeer { peer: WorldRank, waited: Duration, report: String },
    Other(String),
}

/// Encodes a frame that is sent `now` into `into`, replacing its content.
pub(crate) fn encode(frame: Frame, now: Moment, into: &mut Vec<u8>) {
    into.clear();
    let (head, tensors) = match frame {
        Frame::Message(message) => message_head(message, now),
        Frame::Failed(notice) => (failure_head(notice), Vec::new()),
        Frame::Heartbeats(heartbeats) => (Head::Heartbeats(heartbeats), Vec::new()),
        Frame::Process(process) => (Head::Process(process), Vec::new()),
        Frame::ClockRequest { sent } => (Head::ClockRequest { sent }, Vec::new()),
        Frame::ClockAnswer { sent, answered } => (Head::ClockAnswer { sent, answered }, Vec::new()),
    };
    let head = postcard::to_stdvec(&head).expect("a head has nothing that postcard cannot write");
    let length = u32::try_from(head.len()).expect("a head is small");
    into.extend_from_slice(&length.to_le_bytes());
    into.extend_from_slice(&head);
    pad(into);
    for tensor in tensors {
        into.extend_from_slice(tensor.as_bytes());
        pad(into);
    }
}

/// Decodes a frame that [`encode`] wrote and that arrives `now`; tensors are made on the CPU.
pub(crate) fn decode(from: WorldRank, bytes: &[u8], now: Moment) -> Result<Frame, WireError> {
    let short = |expected| WireError::Short { from, found: bytes.len(), expected };
    let length = bytes.first_chunk::<4>().ok_or(short(4))?;
    let end = 4 + u32::from_le_bytes(*length) as usize;
    let head = bytes.get(4..end).ok_or(short(end))?;
    let head = postcard::from_bytes(head).map_err(|source| WireError::Head { from, source })?;
    Ok(match head {
        Head::Heartbeats(heartbeats) => Frame::Heartbeats(heartbeats),
        Head::Process(process) => Frame::Process(process),
        Head::ClockRequest { sent } => Frame::ClockRequest { sent },
        Head::ClockAnswer { sent, answered } => Frame::ClockAnswer { sent, answered },
        Head::Failed { attempt, diverged, rank, step, action, cause } => {
            // An action that cannot be decoded comes from another version; the failure itself matters more.
            let action = action.and_then(|text| text.parse::<Action>().ok());
            let error = StepError { rank, step, action, cause: cause.into() };
            Frame::Failed(FailureNotice { error, attempt, diverged })
        }
        Head::Message { attempt, tag, sent, payload } => {
            let payload = match payload {
                PayloadHead::Tensors(heads) => {
                    Payload::Tensors(tensors(from, heads, bytes, end.next_multiple_of(BLOCK))?)
                }
                PayloadHead::Bytes(bytes) => Payload::Bytes(bytes.into()),
            };
            Frame::Message(Message { from, attempt, tag, payload, sent: now.instant_of(sent) })
        }
    })
}

fn message_head(message: Message, now: Moment) -> (Head, Vec<TensorData>) {
    let mut elements = Vec::new();
    let payload = match message.payload {
        Payload::Tensors(tensors) => PayloadHead::Tensors(
            tensors
                .into_iter()
                .map(|tensor| {
                    let tensor = tensor?;
                    let requires_grad = tensor.requires_grad();
                    let data = tensor.into_data();
                    let head =
                        TensorHead { shape: data.shape().to_vec(), dtype: data.dtype(), requires_grad };
                    elements.push(data);
                    Some(head)
                })
                .collect(),
        ),
        Payload::Bytes(bytes) => PayloadHead::Bytes(bytes.to_vec()),
    };
    (Head::Message { attempt: message.attempt, tag: message.tag, sent: now.common, payload }, elements)
}

fn failure_head(FailureNotice { error, attempt, diverged }: FailureNotice) -> Head {
    let cause = match &error.cause {
        Cause::Build { message } => CauseHead::Build(message.clone()),
        Cause::LostPeer { peer } => CauseHead::LostPeer(*peer),
        Cause::SilentPeer { peer, waited, report } => {
            CauseHead::SilentPeer { peer: *peer, waited: *waited, report: report.clone() }
        }
        cause => CauseHead::Other(cause.to_string()),
    };
    let action = error.action.map(|action| action.to_string());
    Head::Failed { attempt, diverged, rank: error.rank, step: error.step, action, cause }
}

impl From<CauseHead> for Cause {
    fn from(head: CauseHead) -> Self {
        match head {
            CauseHead::Build(message) => Self::Build { message },
            CauseHead::LostPeer(peer) => Self::LostPeer { peer },
            CauseHead::SilentPeer { peer, waited, report } => Self::SilentPeer { peer, waited, report },
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
        let Some(TensorHead { shape, dtype, requires_grad }) = head else { return Ok(None) };
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
        Ok(Some(if requires_grad { value } else { value.constant() }))
    };
    heads.into_iter().map(read).collect()
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
}

impl Moment {
    /// Converts a time on the common clock to an instant of this process, which is never later than the current one.
    fn instant_of(self, common: Nanos) -> Instant {
        let age = Duration::from_nanos(self.common.saturating_sub(common).try_into().unwrap_or(0));
        self.here.checked_sub(age).unwrap_or(self.here)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Bool, Int, Tensor};
    use pipewright_schedule::{Microbatch, StageIndex};

    use super::*;
    use crate::message::Direction;
    use crate::progress::Activity;
    use crate::progress::Waiting;
    use crate::tensor::{pack, unpack};

    const FROM: WorldRank = WorldRank::new(3);

    const STAGE: StageIndex = StageIndex::new(2);
    const MICROBATCH: Microbatch = Microbatch::new(5);
    const BOUNDARY: Tag =
        Tag::Boundary { direction: Direction::Forward, stage: STAGE, microbatch: MICROBATCH };

    fn message(payload: Payload) -> Frame {
        tagged(BOUNDARY, payload)
    }

    fn tagged(tag: Tag, payload: Payload) -> Frame {
        Frame::Message(Message { from: FROM, attempt: Attempt::new(7), tag, payload, sent: Instant::now() })
    }

    /// Returns the next kind of tag, so that each is visited once. A kind that is missing here does not compile.
    fn next(tag: Tag) -> Option<Tag> {
        let (stage, microbatch, source) = (STAGE, MICROBATCH, StageIndex::new(1));
        Some(match tag {
            Tag::Boundary { direction: Direction::Forward, .. } => {
                Tag::Boundary { direction: Direction::Backward, stage, microbatch }
            }
            Tag::Boundary { direction: Direction::Backward, .. } => {
                Tag::Skip { direction: Direction::Forward, source, stage, microbatch }
            }
            Tag::Skip { direction: Direction::Forward, .. } => {
                Tag::Skip { direction: Direction::Backward, source, stage, microbatch }
            }
            Tag::Skip { direction: Direction::Backward, .. } => Tag::Parameters,
            Tag::Parameters => Tag::SharedParameters,
            Tag::SharedParameters => Tag::SharedGradient { parameter: 3, stage, place: 4 },
            Tag::SharedGradient { .. } => Tag::SharedGradientSum { parameter: 5 },
            Tag::SharedGradientSum { .. } => Tag::GradientShard { stage },
            Tag::GradientShard { .. } => Tag::GradientSum { stage },
            Tag::GradientSum { .. } => Tag::ParameterShard { stage, round: 6 },
            Tag::ParameterShard { .. } => Tag::SquaredNorms,
            Tag::SquaredNorms => Tag::Collective { communicator: 8, round: 9 },
            Tag::Collective { .. } => Tag::GradientNorm,
            Tag::GradientNorm => Tag::Ready,
            Tag::Ready => Tag::GlobalNorm,
            Tag::GlobalNorm => Tag::Report,
            Tag::Report => Tag::Summary,
            Tag::Summary => Tag::Hello,
            Tag::Hello => Tag::Welcome,
            Tag::Welcome => Tag::Chosen,
            Tag::Chosen => return None,
        })
    }

    fn now() -> Moment {
        Moment { here: Instant::now(), common: 0 }
    }

    /// Encodes and decodes a frame.
    fn round(frame: Frame) -> Frame {
        let mut bytes = vec![1; 3];
        encode(frame, now(), &mut bytes);
        assert_eq!(bytes.len() % BLOCK, 0);
        decode(FROM, &bytes, now()).expect("what was written can be read")
    }

    fn payload(frame: Frame) -> Payload {
        let Frame::Message(message) = frame else { panic!("a message was sent") };
        assert_eq!((message.from, message.attempt), (FROM, Attempt::new(7)));
        message.payload
    }

    #[test]
    fn every_tag_comes_back() {
        for tag in std::iter::successors(Some(BOUNDARY), |&tag| next(tag)) {
            let Frame::Message(found) = round(tagged(tag, Payload::of(&()))) else {
                panic!("a message was sent")
            };
            assert_eq!(found.tag, tag);
        }
    }

    #[test]
    fn tensors_of_every_kind_come_back() {
        let device = Device::flex();
        let floats = Tensor::<3>::from_floats([[[1.5, -0.0], [f32::MIN_POSITIVE, 3.0]]], &device);
        let ints = Tensor::<1, Int>::from_ints([1, -2, i32::MAX], &device);
        let bools = Tensor::<2, Bool>::from_data([[true, false], [false, true]], &device);
        let empty = Tensor::<2>::zeros([0, 4], &device);
        let values = pack((floats.clone(), ints.clone(), bools.clone(), empty));
        let mut sent: Vec<_> = values.into_iter().map(Some).collect();
        sent.insert(1, None);
        let Payload::Tensors(mut found) = payload(round(message(Payload::Tensors(sent)))) else {
            panic!("tensors were sent")
        };
        assert!(found.remove(1).is_none());
        type All = (Tensor<3>, Tensor<1, Int>, Tensor<2, Bool>, Tensor<2>);
        let found: All = unpack(found.into_iter().flatten().collect()).expect("the same tensors");
        assert_eq!(found.0.into_data(), floats.into_data());
        assert_eq!(found.1.into_data(), ints.into_data());
        assert_eq!(found.2.into_data(), bools.into_data());
        assert_eq!(found.3.dims(), [0, 4]);
    }

    #[test]
    fn a_slice_is_sent_without_its_neighbours() {
        let whole = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::flex());
        let middle = pack(whole.narrow(0, 1, 1)).into_iter().map(Some).collect();
        let Payload::Tensors(found) = payload(round(message(Payload::Tensors(middle)))) else {
            panic!("tensors were sent")
        };
        let found: Tensor<2> = unpack(found.into_iter().flatten().collect()).expect("one tensor");
        assert_eq!(found.into_data().iter::<f32>().collect::<Vec<_>>(), [3.0, 4.0]);
    }

    #[test]
    fn requires_grad_is_sent_with_a_tensor() {
        let [asks, asks_not] =
            [1.0, 2.0].map(|x| pack(Tensor::<1>::from_floats([x], &Device::flex())).remove(0));
        let sent = Payload::Tensors(vec![Some(asks), Some(asks_not.constant())]);
        let Payload::Tensors(found) = payload(round(message(sent))) else { panic!("tensors were sent") };
        let found: Vec<bool> = found.iter().flatten().map(Value::requires_grad).collect();
        assert_eq!(found, [true, false]);
    }

    #[test]
    fn the_time_of_sending_is_converted_between_clocks() {
        let second = 1_000_000_000;
        let mut bytes = Vec::new();
        let sent = Moment { here: Instant::now(), common: 50 * second };
        encode(message(Payload::of(&())), sent, &mut bytes);
        let here = Instant::now() + Duration::from_secs(1000);
        for (arrived, age) in [(52, 2), (50, 0), (49, 0)] {
            let now = Moment { here, common: arrived * second };
            let Ok(Frame::Message(found)) = decode(FROM, &bytes, now) else { panic!("a message was sent") };
            assert_eq!(found.sent(), here - Duration::from_secs(age), "{arrived}");
        }
    }

    #[test]
    fn clock_frames_keep_their_times() {
        let Frame::ClockRequest { sent } = round(Frame::ClockRequest { sent: -5 }) else {
            panic!("a request")
        };
        let answer = Frame::ClockAnswer { sent, answered: i64::MAX };
        let Frame::ClockAnswer { sent, answered } = round(answer) else { panic!("an answer") };
        assert_eq!((sent, answered), (-5, i64::MAX));
    }

    #[test]
    fn sums_keep_their_bits() {
        let parts = [0.1 + 0.2, f64::NAN, f64::INFINITY];
        let Frame::Message(found) = round(message(Payload::of(&parts[..]))) else {
            panic!("a message was sent")
        };
        let found: Vec<f64> = found.read().expect("numbers");
        let bits = |parts: &[f64]| -> Vec<u64> { parts.iter().map(|part| part.to_bits()).collect() };
        assert_eq!(bits(&found), bits(&parts));
    }

    #[test]
    fn a_failure_keeps_its_place_and_its_words() {
        let cause = Cause::Panic { message: "out of cheese".to_owned() };
        let action = Some("2B5".parse().expect("an action"));
        let error = StepError { rank: WorldRank::new(1), step: StepNumber::new(4), action, cause };
        let words = error.to_string();
        let attempt = Attempt::new(9);
        for diverged in [None, Some(StepNumber::new(4))] {
            let sent = Frame::Failed(FailureNotice { error: error.clone(), attempt, diverged });
            let Frame::Failed(found) = round(sent) else { panic!("a failure was sent") };
            let expected = (words.clone(), attempt, diverged);
            assert_eq!((found.error.to_string(), found.attempt, found.diverged), expected);
        }
    }

    #[test]
    fn heartbeats_are_small_and_name_awaited_messages() {
        let (stage, microbatch) = (StageIndex::new(2000), Microbatch::new(5000));
        let tag = Tag::Boundary { direction: Direction::Forward, stage, microbatch };
        let activity = Activity::Waits(Waiting { from: WorldRank::new(1000), tag });
        let heartbeat = Heartbeat { count: 100_000, moves: 1_000_000_000, position: 10_000, activity };
        let mut bytes = Vec::new();
        encode(Frame::Heartbeats(vec![heartbeat; 1000]), now(), &mut bytes);
        assert!(bytes.len() <= 24_000, "{} bytes for 1,000 ranks", bytes.len());
        let Frame::Heartbeats(found) = decode(FROM, &bytes, now()).expect("what was written can be read")
        else {
            panic!("signs of life were sent")
        };
        assert_eq!(found, [heartbeat; 1000]);
    }

    #[test]
    fn cut_letters_are_refused() {
        let tensor = pack(Tensor::<1>::ones([100], &Device::flex())).into_iter().map(Some).collect();
        let mut bytes = Vec::new();
        encode(message(Payload::Tensors(tensor)), now(), &mut bytes);
        for length in [0, 3, 4, 20, BLOCK, bytes.len() - BLOCK] {
            let error = decode(FROM, &bytes[..length], now()).expect_err("it is cut");
            assert!(error.to_string().contains("rank 3"), "{error}");
        }
    }
}
