//! Timed simulations on communicators: small programs worked out by hand, and every program of the catalogue
//! compared with a second simulation.

use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams, judge};
use pipewright_schedule::costs::{Link, StageSizes};
use pipewright_schedule::csv::print_program;
use pipewright_schedule::simulate::{TimedRun, timed, timed_on};
use pipewright_schedule::{Costs, Level, Program};
use proptest::prelude::*;

use crate::equations::{Times, events};
use crate::{BOTH_SEND_FIRST, any_program, communicators, on, program, shuffled};

/// Checks the events of `rows` at `costs`, written `ACTION@START-END`, and what waits in line.
fn check(rows: &str, costs: &str, communicator: &Communicator, expected: &str, waits: &[&str]) {
    let costs = costs.parse().expect("costs");
    let run = timed_on(&program(rows), &costs, communicator).expect("it runs");
    let events = run.timeline().events().iter();
    let events: Vec<String> =
        events.map(|event| format!("{}@{}-{}", event.action, event.start, event.end)).collect();
    assert_eq!(events.join(" "), expected, "{communicator:?}");
    let found: Vec<String> = run
        .timeline()
        .queue_waits()
        .iter()
        .map(|it| {
            format!("rank {}: {} behind {}, {} to {}", it.rank, it.action, it.behind, it.from, it.until)
        })
        .collect();
    assert_eq!(found, waits, "{communicator:?}");
}

/// Rank 1 receives the second activation in front of the first gradient.
const RECEIVE_IN_FRONT: &str = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                                1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n";

#[test]
fn a_receive_holds_the_gradient_behind_it() {
    let costs = "hop=5";
    // Rank 1 posts the second receive at 7, when it has computed 1F0, and makes the first gradient at 9.
    check(
        RECEIVE_IN_FRONT,
        costs,
        &on(Streams::Edge),
        "0F0@0-1 0SEND_F0@1-6 0F1@1-2 0SEND_F1@7-12 0RECV_B0@9-14 0B0@14-16 0RECV_B1@16-21 0B1@21-23 \
         1RECV_F0@1-6 1F0@6-7 1RECV_F1@7-12 1B0@7-9 1SEND_B0@9-14 1F1@12-13 1B1@13-15 1SEND_B1@16-21",
        &["rank 0: 0SEND_F1 behind 0SEND_F0, 2 to 6"],
    );
    // In one queue, the gradient moves only after the second activation.
    check(
        RECEIVE_IN_FRONT,
        costs,
        &on(Streams::Pair),
        "0F0@0-1 0SEND_F0@1-6 0F1@1-2 0SEND_F1@7-12 0RECV_B0@12-17 0B0@17-19 0RECV_B1@19-24 0B1@24-26 \
         1RECV_F0@1-6 1F0@6-7 1RECV_F1@7-12 1B0@7-9 1SEND_B0@12-17 1F1@12-13 1B1@13-15 1SEND_B1@19-24",
        &[
            "rank 0: 0SEND_F1 behind 0SEND_F0, 2 to 6",
            "rank 0: 0RECV_B0 behind 0SEND_F1, 2 to 12",
            "rank 1: 1SEND_B0 behind 1RECV_F1, 9 to 12",
            "rank 1: 1SEND_B1 behind 1SEND_B0, 15 to 17",
        ],
    );
}

#[test]
fn eager_messages_and_groups_wait_less() {
    let costs = "hop=5".parse().expect("costs");
    let makespan = |communicator: Communicator| {
        timed_on(&program(RECEIVE_IN_FRONT), &costs, &communicator).expect("it runs").timeline().makespan()
    };
    let buffered = timed(&program(RECEIVE_IN_FRONT), &costs).expect("it runs").timeline().makespan();
    assert_eq!((makespan(on(Streams::Buffered)), buffered), (19.0, 19.0));
    assert_eq!((makespan(on(Streams::Edge)), makespan(on(Streams::Pair))), (23.0, 26.0));
    let eager = |streams| Communicator { sends: Sends::Eager, ..on(streams) };
    assert_eq!((makespan(eager(Streams::Edge)), makespan(eager(Streams::Rank))), (19.0, 19.0));
    let small = Sends::EagerUpTo { limit: 7, messages: vec![8] };
    assert_eq!(makespan(Communicator { sends: small, ..on(Streams::Pair) }), 26.0);
    // Rank 0 starts the second activation and the receive of the first gradient together, but rank 1 does not.
    assert_eq!(makespan(Communicator { groups: Groups::Consecutive, ..on(Streams::Pair) }), 26.0);
}

#[test]
fn programs_that_are_not_sound_are_refused() {
    let refuse = |rows: &str, streams| {
        let error = timed_on(&program(rows), &Costs::default(), &on(streams)).expect_err("it is not sound");
        error.to_string()
    };
    assert_eq!(
        refuse(BOTH_SEND_FIRST, Streams::Pair),
        "on the transport pair, the program may hang: rank 0 at position 4 (0RECV_B0) runs after 0SEND_F1, which is \
         before it in its stream; rank 0 at position 3 (0SEND_F1) waits for 1RECV_F1 of rank 1; rank 1 at position 4 \
         (1RECV_F1) runs after 1SEND_B0, which is before it in its stream; rank 1 at position 3 (1SEND_B0) waits for \
         0RECV_B0 of rank 0; `pipewright lower FILE.csv --pass order-safe` orders the messages of a file, if an order exists"
    );
    assert_eq!(
        refuse("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n", Streams::Edge),
        "on the transport edge, the program has crossed messages: rank 1, position 0: 1RECV_F1 gets the tensor of \
         0SEND_F0 from rank 0; `pipewright lower FILE.csv --pass order-safe` orders the messages of a file, if an order exists"
    );
    assert!(refuse("0F0,0SEND_F0\n1RECV_F0\n", Streams::Edge).starts_with("unsound program, "));
}

/// Returns the costs of `times` for the stages of `program`. A byte takes a second.
fn costs_of(program: &Program, times: Times) -> Costs {
    let text = format!("F={},I={},W={}", times.forward, times.input_backward, times.weight_backward);
    let mut costs: Costs = text.parse().expect("costs");
    costs.link = Link { latency: times.latency as f64, bandwidth: 1.0 };
    let sizes =
        |stage: u32| StageSizes { output: times.occupied[stage.min(1) as usize], ..StageSizes::default() };
    costs.sizes = (0..program.placement().stages()).map(sizes).collect();
    costs
}

fn any_times() -> impl Strategy<Value = Times> {
    let message = (0..3u64, [0..4u64, 0..4u64]);
    (1..4u64, 1..4u64, 1..4u64, message).prop_map(
        |(forward, input_backward, weight_backward, (latency, occupied))| Times {
            forward,
            input_backward,
            weight_backward,
            latency,
            occupied,
        },
    )
}

/// Asserts that both simulations agree on every event of `program` on every communicator.
fn check_agreement(program: &Program, times: Times) -> Result<(), TestCaseError> {
    let costs = costs_of(program, times);
    let buffered = timed(program, &costs).ok();
    if let Ok(run) = timed_on(program, &costs, &Communicator::default()) {
        prop_assert_eq!(Some(run.timeline()), buffered.as_ref().map(TimedRun::timeline));
    }
    for communicator in communicators().into_iter().filter(|it| it.streams != Streams::Buffered) {
        let is_sound = judge(program, Level::Comms, &communicator).is_ok_and(|verdict| verdict.is_sound());
        let run = timed_on(program, &costs, &communicator);
        prop_assert_eq!(run.is_ok(), is_sound, "{:?}\n{}", communicator, print_program(program));
        let Ok(run) = run else { continue };
        let found = run.timeline().events().iter();
        let mut found: Vec<_> = found
            .map(|it| (it.rank.get(), it.action.to_string(), it.start.to_string(), it.end.to_string()))
            .collect();
        let expected = events(program, times, &communicator);
        let mut expected: Vec<_> = (0..)
            .zip(expected)
            .flat_map(|(rank, events)| {
                events
                    .into_iter()
                    .map(move |(action, start, end)| (rank, action, start.to_string(), end.to_string()))
            })
            .collect();
        found.sort();
        expected.sort();
        prop_assert_eq!(found, expected, "{:?}\n{}", communicator, print_program(program));
        // A communicator with queues never ends earlier than buffered messages.
        let makespan = buffered.as_ref().map(|run| run.timeline().makespan());
        prop_assert!(
            makespan.is_some_and(|buffered| run.timeline().makespan() >= buffered),
            "{:?}\n{}",
            communicator,
            print_program(program)
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn both_simulations_agree(
        program in any_program(),
        swaps in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 0..6),
        times in any_times(),
    ) {
        check_agreement(&shuffled(program, &swaps), times)?;
    }
}
