//! The messages between ranks that a step records.

use pipewright::batch::{Batch, SplitRule};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::tensor::Metadata;
use pipewright::transport::World;
use pipewright_schedule::measured::read_trace;
use pipewright_schedule::{MessageEnd, Rank, Timeline};

use crate::support::{ROWS, WIDTH, batch, config, program, stage};

const MICROBATCHES: u32 = 4;

/// Returns the other rank, the bytes and the tensors of each message of a rank, with its action.
fn messages_of(timeline: &Timeline, rank: u32) -> Vec<String> {
    timeline.messages_of(Rank::new(rank)).iter().map(ToString::to_string).collect()
}

/// Checks that every send and receive of a step has a message, that both ends say the same, and that a trace keeps it.
fn check(schedule: &str, ranks: u32, replicas: u32) {
    let config = PipelineConfig { data_parallel: replicas, ..config() };
    let program = program(schedule, ranks, MICROBATCHES);
    let (stages, placement) = (program.placement().stages(), program.placement().clone());
    let make = move |index| stage(index, stages);
    let mut pipeline =
        Pipeline::launch(program, World::local(ranks * replicas), &config, make).expect("it starts");
    let all = MICROBATCHES * replicas;
    let summary = pipeline.step(batch(0, all), batch(100, all), 1e-2).expect("a step");
    let timeline = &summary.timeline;
    let communicates = timeline.events().iter().filter(|event| {
        let kind = event.action.kind();
        kind.is_send() || kind.is_receive()
    });
    let communicates: Vec<_> = communicates.collect();
    assert_eq!(communicates.len(), timeline.messages().len(), "{schedule}");
    let mut sent = vec![0; (ranks * replicas) as usize];
    for event in communicates {
        let message = timeline.message(event.rank, MessageEnd::Action(event.action));
        let message = message.unwrap_or_else(|| panic!("{schedule}: nothing is known of {}", event.action));
        let form = message.tensors.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(form, [format!("f32 [{ROWS}, {WIDTH}]")], "{schedule}");
        assert_eq!(message.bytes, (ROWS * WIDTH * 4) as u64, "{schedule}");
        // The other end is a rank of the same replica, which has the neighbouring stage.
        assert_eq!(message.peer.get() / ranks, event.rank.get() / ranks, "{schedule}");
        let is_other_end = |other: &&pipewright_schedule::MessageRecord| {
            let MessageEnd::Action(action) = other.end else { return false };
            let kinds = (action.kind().is_send(), event.action.kind().is_send());
            kinds.0 != kinds.1 && other.peer == event.rank && action.microbatch() == event.action.microbatch()
        };
        let stage = event.action.stage();
        let neighbours = [placement.previous(stage), placement.next(stage)];
        let rank_of = |stage| placement.rank_of(stage).get();
        assert!(neighbours.into_iter().flatten().any(|stage| rank_of(stage) == message.peer.get() % ranks));
        assert!(timeline.messages_of(message.peer).iter().any(|other| is_other_end(&other)), "{schedule}");
        if event.action.kind().is_send() {
            sent[event.rank.index()] += message.bytes;
        }
    }
    assert_eq!(sent, summary.boundary_bytes, "{schedule}");
    let read = read_trace(&timeline.chrome_trace()).expect("its own trace");
    assert_eq!(read.messages(), timeline.messages(), "{schedule}");
}

#[test]
fn every_send_and_receive_says_the_other_rank_the_bytes_and_the_tensors() {
    for schedule in ["1f1b", "gpipe", "zb-h1", "zbvzerobubble", "dualpipev", "interleaved1f1b"] {
        check(schedule, 2, 1);
    }
    check("1f1b", 4, 1);
    check("1f1b", 2, 2);
    check("zbvzerobubble", 2, 3);
    check("gpipe", 1, 2);
}

#[test]
fn messages_of_microbatches_of_different_sizes_have_their_own_shapes() {
    let metadata = Metadata::Dynamic { free: vec![0] };
    let program = program("gpipe", 2, MICROBATCHES);
    let mut pipeline =
        Pipeline::launch(program, World::local(2), &PipelineConfig { metadata, ..config() }, |index| {
            stage(index, 2)
        })
        .expect("it starts");
    let rows = |seed| batch(seed, 2).narrow(0, 0, 5);
    for _ in 0..2 {
        let whole = Batch::split(rows(0), rows(1), SplitRule::balanced(MICROBATCHES)).expect("it splits");
        let timeline = pipeline.step_batch(whole, 1e-2).expect("a step").timeline;
        let expected = |action: &str, end: &str| -> Vec<String> {
            let message = |(microbatch, rows): (usize, usize)| {
                format!("{action}{microbatch} {end}: {} bytes, f32 [{rows}, {WIDTH}]", 4 * rows * WIDTH)
            };
            [2, 1, 1, 1].into_iter().enumerate().map(message).collect()
        };
        let of = |ends: [(&str, &str); 2]| ends.map(|(action, end)| expected(action, end)).concat();
        let mut found = [messages_of(&timeline, 0), messages_of(&timeline, 1)];
        let mut expected = [
            of([("0SEND_F", "to rank 1"), ("0RECV_B", "from rank 1")]),
            of([("1RECV_F", "from rank 0"), ("1SEND_B", "to rank 0")]),
        ];
        found.iter_mut().chain(&mut expected).for_each(|messages| messages.sort());
        assert_eq!(found, expected);
    }
}
