//! Tests of the byte format: every frame comes back, and damaged bytes are refused.

use burn::tensor::{Bool, Int, Tensor};
use pipewright_schedule::{Microbatch, StageIndex};

use super::*;
use crate::message::{AwaitedMessage, Direction};
use crate::progress::Activity;
use crate::tensor::{TensorRank, pack, unpack};
use crate::verification::Content;

const FROM: WorldRank = WorldRank::new(3);

const STAGE: StageIndex = StageIndex::new(2);
const MICROBATCH: Microbatch = Microbatch::new(5);
const BOUNDARY: Tag = Tag::Boundary { direction: Direction::Forward, stage: STAGE, microbatch: MICROBATCH };

fn message(payload: Payload) -> Frame {
    tagged(BOUNDARY, payload)
}

fn tagged(tag: Tag, payload: Payload) -> Frame {
    let now = Instant::now();
    Frame::Message(Message { from: FROM, attempt: Attempt::new(7), tag, payload, sent: now, arrived: now })
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
        Tag::SharedParameters => Tag::SharedGradient { parameter: 3, stage, index: 4 },
        Tag::SharedGradient { .. } => Tag::SharedGradientSum { parameter: 5 },
        Tag::SharedGradientSum { .. } => Tag::GradientShard { stage, of_experts: true },
        Tag::GradientShard { .. } => Tag::GradientSum { stage, of_experts: false },
        Tag::GradientSum { .. } => Tag::ParameterShard { stage, round: 6 },
        Tag::ParameterShard { .. } => Tag::Statistics { stage },
        Tag::Statistics { .. } => Tag::ReplicaSquares,
        Tag::ReplicaSquares => Tag::Collective { communicator: 8, round: 9 },
        Tag::Collective { .. } => Tag::TensorGroup { half: None, round: 10 },
        Tag::TensorGroup { half: None, .. } => Tag::TensorGroup { half: Some(Direction::Forward), round: 10 },
        Tag::TensorGroup { .. } => Tag::GroupReady { position: 7 },
        Tag::GroupReady { .. } => Tag::ExpertGroup { half: None, round: 11 },
        Tag::ExpertGroup { half: None, .. } => {
            Tag::ExpertGroup { half: Some(Direction::Backward), round: 12 }
        }
        Tag::ExpertGroup { .. } => Tag::Squares,
        Tag::Squares => Tag::Ready,
        Tag::Ready => Tag::GlobalNorm,
        Tag::GlobalNorm => Tag::StepDigest,
        Tag::StepDigest => Tag::SameStep,
        Tag::SameStep => Tag::StepForms,
        Tag::StepForms => Tag::AgreedStep,
        Tag::AgreedStep => Tag::Checksums,
        Tag::Checksums => Tag::Verdict,
        Tag::Verdict => Tag::Report,
        Tag::Report => Tag::Summary,
        Tag::Summary => Tag::Hello,
        Tag::Hello => Tag::Welcome,
        Tag::Welcome => Tag::Chosen { round: 2 },
        Tag::Chosen { .. } => Tag::Shared,
        Tag::Shared => Tag::Layers { from: source, to: stage },
        Tag::Layers { .. } => Tag::Ordered { number: 11 },
        Tag::Ordered { .. } => return None,
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
    decode(FROM, &bytes, now()).expect("an encoded frame can be decoded")
}

fn payload(frame: Frame) -> Payload {
    let Frame::Message(message) = frame else { panic!("a message was sent") };
    assert_eq!((message.from, message.attempt), (FROM, Attempt::new(7)));
    message.payload
}

/// Encodes and decodes values in one message.
fn carried(sent: Vec<Option<Value>>) -> Vec<Option<Value>> {
    let Payload::Tensors(found) = payload(round(message(Payload::Tensors(sent)))) else {
        panic!("tensors were sent")
    };
    found
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
    let mut found = carried(sent);
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
    let found = carried(middle).into_iter().flatten().collect();
    let found: Tensor<2> = unpack(found).expect("one tensor");
    assert_eq!(found.into_data().iter::<f32>().collect::<Vec<_>>(), [3.0, 4.0]);
}

#[test]
fn requires_grad_is_sent_with_a_tensor() {
    let [asks, asks_not] = [1.0, 2.0].map(|x| pack(Tensor::<1>::from_floats([x], &Device::flex())).remove(0));
    let found = carried(vec![Some(asks), Some(asks_not.constant())]);
    let found: Vec<bool> = found.iter().flatten().map(Value::requires_grad).collect();
    assert_eq!(found, [true, false]);
}

#[test]
fn the_layout_of_a_part_is_sent_with_it() {
    let whole = pack(Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &Device::flex())).remove(0);
    let part = whole.part_for(TensorRank { index: 1, of: 2 });
    let expected = part.layout().cloned();
    let found = carried(vec![Some(part)]).into_iter().flatten().next().expect("one tensor");
    assert!(expected.is_some());
    assert_eq!(found.layout().cloned(), expected);
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
fn the_size_of_posted_receives_is_kept() {
    let Frame::Room { bytes } = round(Frame::Room { bytes: 1 << 33 }) else { panic!("a size was sent") };
    assert_eq!(bytes, 1 << 33);
}

#[test]
fn bytes_come_back() {
    for length in [0, 1, BLOCK, 1000] {
        let sent: Vec<u8> = (0..length).map(|index| index as u8).collect();
        let Frame::Bytes(found) = round(Frame::Bytes(sent.clone())) else { panic!("bytes were sent") };
        assert_eq!(found, sent);
    }
}

#[test]
fn clock_frames_keep_their_times() {
    let Frame::ClockRequest { sent } = round(Frame::ClockRequest { sent: -5 }) else { panic!("a request") };
    let answer = Frame::ClockAnswer { sent, answered: i64::MAX };
    let Frame::ClockAnswer { sent, answered } = round(answer) else { panic!("an answer") };
    assert_eq!((sent, answered), (-5, i64::MAX));
}

#[test]
fn sums_keep_their_bits() {
    let parts = [0.1 + 0.2, f64::NAN, f64::INFINITY];
    let Frame::Message(found) = round(message(Payload::of(&parts[..]))) else { panic!("a message was sent") };
    let found: Vec<f64> = found.read().expect("numbers");
    let bits = |parts: &[f64]| -> Vec<u64> { parts.iter().map(|part| part.to_bits()).collect() };
    assert_eq!(bits(&found), bits(&parts));
}

/// Returns a failed step as it arrives: with the same words as `error` and the same notice.
fn failed(error: StepError, stops_all: bool, diverged: Option<StepNumber>) -> Cause {
    let (words, attempt) = (error.to_string(), Attempt::new(9));
    let Frame::Failed(found) = round(Frame::Failed(FailureNotice { error, attempt, stops_all, diverged }))
    else {
        panic!("a failure was sent")
    };
    assert_eq!(found.error.to_string(), words);
    assert_eq!((found.attempt, found.stops_all, found.diverged), (attempt, stops_all, diverged));
    found.error.cause
}

fn error(action: Option<&str>, cause: Cause) -> StepError {
    let action = action.map(|action| action.parse().expect("an action"));
    StepError { rank: WorldRank::new(1), step: StepNumber::new(4), action, cause }
}

#[test]
fn a_failure_keeps_its_place_and_its_words() {
    let cause = Cause::Panic { message: "out of cheese".to_owned() };
    for (stops_all, diverged) in [(false, None), (false, Some(StepNumber::new(4))), (true, None)] {
        failed(error(Some("2B5"), cause.clone()), stops_all, diverged);
    }
}

#[test]
fn a_failed_update_keeps_its_stage() {
    let failure = UpdateFailure::DeviceMemory { bytes: 4096 };
    let found = failed(error(None, Cause::Update { stage: StageIndex::new(5), failure }), false, None);
    assert!(matches!(found, Cause::Update { stage, .. } if stage == StageIndex::new(5)));
}

#[test]
fn a_failed_transport_a_mistake_and_a_suspicious_step_are_the_same_in_every_process() {
    let message = || "out of cheese".to_owned();
    let difference = Box::new(Difference {
        content: Content::Forward,
        stage: StageIndex::new(5),
        microbatch: Microbatch::new(2),
        wrong: vec![WorldRank::new(3)],
        undecided: Vec::new(),
    });
    let suspicion = Suspicion::Jump { norm: 1e9, usual: 0.1 };
    for cause in [
        Cause::Transport { message: message() },
        Cause::WrongInput { message: message() },
        Cause::Suspicious { suspicion },
        Cause::Unconfirmed { difference: difference.clone() },
    ] {
        let kind = std::mem::discriminant(&cause);
        let found = failed(error(None, cause), false, None);
        assert_eq!(std::mem::discriminant(&found), kind);
        if let Cause::Unconfirmed { difference: found } = found {
            assert_eq!(found, difference);
        }
    }
}

#[test]
fn heartbeats_are_small_and_name_awaited_messages() {
    let (stage, microbatch) = (StageIndex::new(2000), Microbatch::new(5000));
    let tag = Tag::Boundary { direction: Direction::Forward, stage, microbatch };
    let activity = Activity::Waits(AwaitedMessage { from: WorldRank::new(1000), tag });
    let heartbeat = Heartbeat { count: 100_000, moves: 1_000_000_000, position: 10_000, activity };
    let mut bytes = Vec::new();
    encode(Frame::Heartbeats(vec![heartbeat; 1000]), now(), &mut bytes);
    assert!(bytes.len() <= 24_000, "{} bytes for 1,000 ranks", bytes.len());
    let Frame::Heartbeats(found) = decode(FROM, &bytes, now()).expect("an encoded frame can be decoded")
    else {
        panic!("heartbeats were sent")
    };
    assert_eq!(found, [heartbeat; 1000]);
}

#[test]
fn truncated_frames_are_refused() {
    let tensor = pack(Tensor::<1>::ones([100], &Device::flex())).into_iter().map(Some).collect();
    let mut bytes = Vec::new();
    encode(message(Payload::Tensors(tensor)), now(), &mut bytes);
    for length in [0, 3, 4, 7, 8, 20, BLOCK, bytes.len() - BLOCK] {
        let error = decode(FROM, &bytes[..length], now()).expect_err("it is cut");
        assert!(error.to_string().contains("rank 3"), "{error}");
    }
}

#[test]
fn frames_of_another_version_are_refused() {
    let mut bytes = Vec::new();
    encode(Frame::Room { bytes: 64 }, now(), &mut bytes);
    bytes[..4].copy_from_slice(&[17, 0, 0, 0]);
    let error = decode(FROM, &bytes, now()).expect_err("the format differs");
    let expected = "rank 3 sends frames that begin with `\\x11\\x00\\x00\\x00`, and frames of this process begin with `pw 7`: the ranks \
                    run different versions of the program";
    assert!(error.to_string().starts_with(expected), "{error}");
}
