//! Verdicts on programs for communicators without tags and without buffers, compared with a second judge that
//! shares no code with the crate's.

mod checker;
mod equations;
mod gloo;
mod order_safe;
mod timing;

use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams, judge};
use pipewright_schedule::csv::{parse_program, print_program};
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::lower::{defer_recv, wait_send};
use pipewright_schedule::{Level, LowerConfig, Program, ScheduleSpec, generate, lower, validate};
use proptest::prelude::*;

fn on(streams: Streams) -> Communicator {
    Communicator { streams, ..Communicator::default() }
}

/// Every communicator, with the sends of each kind; messages after stage 0 are small enough for an eager
/// send.
fn communicators() -> Vec<Communicator> {
    let limited = || Sends::EagerUpTo { limit: 8, messages: vec![9, 8] };
    let sends = || [Sends::Rendezvous, Sends::Eager, limited()];
    let of = |streams| {
        [Groups::Single, Groups::Consecutive]
            .into_iter()
            .flat_map(move |groups| sends().map(|sends| Communicator { streams, sends, groups }))
    };
    Streams::ALL.into_iter().flat_map(of).collect()
}

fn program(rows: &str) -> Program {
    parse_program(rows).expect("a program")
}

fn check(rows: &str, communicator: &Communicator, expected: &str) {
    let verdict = judge(&program(rows), Level::Comms, communicator).expect("the program is complete");
    assert_eq!(verdict.to_string(), expected, "{communicator:?}\n{rows}");
}

/// Two ranks that both send before they receive.
const BOTH_SEND_FIRST: &str = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                               1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";

#[test]
fn two_ranks_that_both_send_first_hang_in_one_stream() {
    let cycle = "may hang\n  \
         rank 0 at position 4 (0RECV_B0) runs after 0SEND_F1, which is before it in its stream\n  \
         rank 0 at position 3 (0SEND_F1) waits for 1RECV_F1 of rank 1\n  \
         rank 1 at position 4 (1RECV_F1) runs after 1SEND_B0, which is before it in its stream\n  \
         rank 1 at position 3 (1SEND_B0) waits for 0RECV_B0 of rank 0";
    check(BOTH_SEND_FIRST, &on(Streams::Pair), cycle);
    check(BOTH_SEND_FIRST, &on(Streams::Rank), cycle);
    for sound in [
        on(Streams::Buffered),
        on(Streams::Edge),
        Communicator { sends: Sends::Eager, ..on(Streams::Rank) },
        Communicator { sends: Sends::EagerUpTo { limit: 8, messages: vec![8] }, ..on(Streams::Pair) },
    ] {
        check(BOTH_SEND_FIRST, &sound, "sound");
    }
    let large = Sends::EagerUpTo { limit: 7, messages: vec![8] };
    check(BOTH_SEND_FIRST, &Communicator { sends: large, ..on(Streams::Pair) }, cycle);
}

#[test]
fn a_group_of_both_directions_runs_at_once() {
    // As Megatron exchanges the activation of one microbatch against the gradient of another one.
    let exchange = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                    1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    check(exchange, &Communicator { groups: Groups::Consecutive, ..on(Streams::Rank) }, "sound");
}

/// An eager send of a group completes before a send in front of it that waits. Its message still meets the
/// receive of its own number.
#[test]
fn an_eager_message_does_not_take_the_receive_of_an_earlier_one() {
    let rows = "0F0,0SEND_F0,0WAIT_SEND_F0,2RECV_F0,2F0,0F1,0SEND_F1,2SEND_F0,0WAIT_SEND_F1,2RECV_F1,2F1,2SEND_F1\n\
                1RECV_F0,1F0,1SEND_F0,1WAIT_SEND_F0,1RECV_F1,1F1,1SEND_F1,1WAIT_SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1\n";
    let grouped = Communicator { groups: Groups::Consecutive, ..on(Streams::Edge) };
    check(rows, &grouped, "sound");
    let sends = Sends::EagerUpTo { limit: 8, messages: vec![9, 9, 8] };
    check(rows, &Communicator { sends, ..grouped }, "sound");
}

#[test]
fn receives_in_another_order_cross_without_tags() {
    let rows = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n";
    let crossed = "crossed\n  \
        rank 1, position 0: 1RECV_F1 gets the tensor of 0SEND_F0 from rank 0\n  \
        rank 1, position 1: 1RECV_F0 gets the tensor of 0SEND_F1 from rank 0";
    for streams in [Streams::Edge, Streams::Pair, Streams::Rank] {
        check(rows, &on(streams), crossed);
    }
    check(rows, &on(Streams::Buffered), "sound");
}

#[test]
fn a_wait_for_a_send_holds_the_rank() {
    let rows = "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1\n";
    check(rows, &on(Streams::Buffered), "sound");
    check(
        rows,
        &on(Streams::Edge),
        "may hang\n  \
         rank 0 at position 5 (0WAIT_SEND_F1) waits for 0SEND_F1\n  \
         rank 0 at position 4 (0SEND_F1) waits for 1RECV_F1, which rank 1 has not reached\n  \
         rank 1 at position 4 (1WAIT_SEND_B0) waits for 1SEND_B0\n  \
         rank 1 at position 3 (1SEND_B0) waits for 0RECV_B0, which rank 0 has not reached",
    );
}

#[test]
fn a_cycle_of_computations_hangs_with_buffers_too() {
    let rows = "0F0,0SEND_F0,0RECV_B1,0B1,0F1,0SEND_F1,0RECV_B0,0B0\n\
                1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    let error = judge(&program(rows), Level::Comms, &on(Streams::Buffered))
        .expect_err("a backward before its forward");
    assert!(error.to_string().contains("0B1 needs 0F1"), "{error}");
    let rows = "0RECV_B1,0F0,0SEND_F0,0F1,0SEND_F1,0B1,0RECV_B0,0B0\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n";
    check(rows, &on(Streams::Buffered), "sound");
}

#[test]
fn a_program_without_messages_is_sound() {
    let schedule = generate("1f1b", &ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() });
    let compute =
        lower(&schedule.expect("a schedule"), &LowerConfig::from(Level::Compute)).expect("it lowers");
    for streams in Streams::ALL {
        assert!(judge(&compute, Level::Compute, &on(streams)).expect("it is complete").is_sound());
    }
}

#[test]
fn names_are_read_and_printed() {
    for streams in Streams::ALL {
        assert_eq!(streams.to_string().parse(), Ok(streams));
        assert!(!streams.assumption().is_empty());
    }
    let error = "nccl".parse::<Streams>().expect_err("no kind of streams");
    assert_eq!(error.to_string(), "`nccl` is not a transport; use buffered, edge, pair, rank or all");
}

/// Asserts that the verdicts of both judges agree on every communicator.
fn check_agreement(program: &Program) -> Result<(), TestCaseError> {
    for communicator in communicators() {
        let Ok(verdict) = judge(program, Level::Comms, &communicator) else { return Ok(()) };
        let expected = checker::judge(program, &communicator);
        let found = (verdict.crossed > 0, !verdict.cycle.is_empty());
        prop_assert_eq!(
            found,
            (expected.is_crossed, expected.hangs),
            "{:?}\n{}{}",
            communicator,
            print_program(program),
            verdict
        );
    }
    Ok(())
}

/// Programs of the catalogue, with the options of PyTorch's lowering.
fn any_program() -> impl Strategy<Value = Program> {
    let options = (any::<bool>(), any::<bool>(), any::<bool>());
    (prop::sample::select(catalogue()), 2..5u32, 1..9u32, options).prop_filter_map(
        "a size that the schedule refuses",
        |(generator, ranks, microbatches, (send_early, waits, defers))| {
            let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
            let schedule = generate(generator.name, &spec).ok()?;
            let config = LowerConfig { send_early, ..LowerConfig::from(Level::Comms) };
            let program = lower(&schedule, &config).ok()?;
            let program = if waits { wait_send(program) } else { program };
            Some(if defers { defer_recv(program) } else { program })
        },
    )
}

/// Exchanges neighbouring actions of a row, `swaps` times.
fn shuffled(program: Program, swaps: &[(prop::sample::Index, prop::sample::Index)]) -> Program {
    let mut rows: Vec<_> = program.rows().to_vec();
    for (rank, position) in swaps {
        let row = rank.get_mut(&mut rows);
        if row.len() > 1 {
            let position = position.index(row.len() - 1);
            row.swap(position, position + 1);
        }
    }
    let placement = program.placement().clone();
    Program::new(placement, program.microbatches(), rows).expect("the same actions")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn both_judges_agree(program in any_program(), swaps in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 0..12)) {
        check_agreement(&shuffled(program, &swaps))?;
    }

    /// A program whose sends may block until they are received is sound on every communicator.
    #[test]
    fn proved_programs_are_sound_everywhere(program in any_program()) {
        let has_waits = print_program(&program).contains("WAIT");
        if !has_waits && validate(program.clone(), Level::Comms).is_ok() {
            for communicator in communicators() {
                let verdict = judge(&program, Level::Comms, &communicator).expect("it is complete");
                prop_assert!(verdict.is_sound(), "{:?}\n{}{}", communicator, print_program(&program), verdict);
            }
        }
    }
}
