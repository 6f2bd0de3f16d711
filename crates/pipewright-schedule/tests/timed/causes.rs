//! Why each action starts when it does: tables of small programs, and properties of the causes of every schedule.

use pipewright_schedule::causes::{Cause, Causes, Cell, Wait, causes};
use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams};
use pipewright_schedule::costs::{SkipTransfer, StageCosts};
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::simulate::{timed, timed_on};
use pipewright_schedule::{
    Costs, Event, Level, LowerConfig, Rank, ScheduleSpec, StageIndex, Timeline, generate, lower,
};

use crate::program;

/// The computations of a rank, in their order.
fn cells(timeline: &Timeline, rank: Rank) -> Vec<Event> {
    timeline.events_of(rank).iter().filter(|event| event.action.is_compute()).copied().collect()
}

fn event(timeline: &Timeline, cell: Cell) -> Event {
    cells(timeline, cell.rank)[cell.index]
}

fn name(timeline: &Timeline, cell: Option<Cell>) -> String {
    cell.map_or_else(|| "the start".to_owned(), |cell| event(timeline, cell).action.to_string())
}

fn wait_in_words(timeline: &Timeline, wait: Wait) -> String {
    let Wait { action, until, after, .. } = wait;
    format!("{action} until {until} after {}", name(timeline, after))
}

/// Returns a cause in words; nothing if the action follows the one before it.
fn words(timeline: &Timeline, cause: &Cause) -> String {
    match cause {
        Cause::Order => String::new(),
        Cause::Start => " start".to_owned(),
        Cause::Delay => " delay".to_owned(),
        Cause::Wait(wait) => format!(" {}", wait_in_words(timeline, *wait)),
        Cause::Message { from, tensor, in_line } => {
            let line =
                in_line.map_or_else(String::new, |wait| format!(", {} behind {}", wait.action, wait.behind));
            format!(" {} of {}{line}", tensor.name(), name(timeline, Some(*from)))
        }
    }
}

/// Checks the causes of a timeline, a line for each rank, and the critical path from the start of the step.
fn check(timeline: &Timeline, found: &Causes, expected: &[&str], path: &str) {
    let row = |rank: u32| {
        let rank = Rank::new(rank);
        let causes = cells(timeline, rank).into_iter().zip(found.of_rank(rank));
        let causes = causes.map(|(event, cause)| format!("{}{}", event.action, words(timeline, cause)));
        let end = found.wait_at_end(rank).map(|wait| format!("end {}", wait_in_words(timeline, wait)));
        causes.chain(end).collect::<Vec<_>>().join("; ")
    };
    let rows: Vec<String> = (0..timeline.ranks()).map(row).collect();
    assert_eq!(rows, expected);
    let mut names: Vec<String> =
        found.critical_path().into_iter().map(|cell| name(timeline, Some(cell))).collect();
    names.reverse();
    assert_eq!(names.join(" "), path);
}

fn check_simulated(rows: &str, costs: &Costs, streams: Streams, expected: &[&str], path: &str) {
    let communicator = Communicator { streams, ..Communicator::default() };
    let run = timed_on(&program(rows), costs, &communicator).expect("it runs");
    let found = causes(run.timeline(), run.timeline().ranks(), costs, false);
    check(run.timeline(), &found, expected, path);
}

const ONE_MICROBATCH: &str = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n\
                              2RECV_F0,2F0,2B0,2SEND_B0\n";

#[test]
fn messages_and_the_order_of_a_rank() {
    let expected = [
        "0F0 start; 0B0 output gradient of 1B0",
        "1F0 input of 0F0; 1B0 output gradient of 2B0",
        "2F0 input of 1F0; 2B0",
    ];
    let costs: Costs = "hop=0.5".parse().expect("costs");
    check_simulated(ONE_MICROBATCH, &costs, Streams::Buffered, &expected, "0F0 1F0 2F0 2B0 1B0 0B0");
    let rows = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n";
    check_simulated(
        rows,
        &costs,
        Streams::Buffered,
        &["0F0 start; 0F1", "1F0 input of 0F0; 1F1"],
        "0F0 1F0 1F1",
    );
}

#[test]
fn a_skip_connection_that_arrives_last() {
    let skips = vec![SkipTransfer { from: StageIndex::new(0), to: StageIndex::new(2), bytes: 6 }];
    let costs = Costs { skips, ..link(0.125, 1.0) };
    let expected = [
        "0F0 start; 0B0 skip connection of 2B0",
        "1F0 input of 0F0; 1B0 output gradient of 2B0",
        "2F0 skip connection of 0F0; 2B0",
    ];
    check_simulated(ONE_MICROBATCH, &costs, Streams::Buffered, &expected, "0F0 2F0 2B0 0B0");
}

fn link(latency: f64, bandwidth: f64) -> Costs {
    Costs { link: pipewright_schedule::costs::Link { latency, bandwidth }, ..Costs::default() }
}

#[test]
fn waits_of_a_rank_for_its_own_communication() {
    let costs: Costs = "hop=5".parse().expect("costs");
    let rows = "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n";
    let expected = ["0F0 start; 0F1 0WAIT_SEND_F0 until 6 after 0F0", "1F0 input of 0F0; 1F1 input of 0F1"];
    check_simulated(rows, &costs, Streams::Buffered, &expected, "0F0 0F1 1F1");
    let rows =
        "0UNSHARD,0F0,1UNSHARD,1F0,1B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n";
    let mut costs = Costs::default();
    costs.stages[0] = StageCosts { unshard: 2.5, reduce_grad: 4.0, ..costs.stages[0] };
    let expected = "0F0 0UNSHARD until 2.5 after the start; 1F0 1UNSHARD until 6 after 0F0; 1B0; 0B0 1WAIT_REDUCE_GRAD until 13 \
                    after 1B0; end 0WAIT_REDUCE_GRAD until 19 after 0B0";
    check_simulated(rows, &costs, Streams::Buffered, &[expected], "0F0 1F0 1B0 0B0");
}

/// The gradient waits behind the receive of the second activation.
#[test]
fn an_operation_in_front_in_the_queue() {
    let rows = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n";
    let costs: Costs = "hop=5".parse().expect("costs");
    let buffered = [
        "0F0 start; 0F1; 0B0 output gradient of 1B0; 0B1 output gradient of 1B1",
        "1F0 input of 0F0; 1B0; 1F1; 1B1",
    ];
    check_simulated(rows, &costs, Streams::Buffered, &buffered, "0F0 1F0 1B0 1F1 1B1 0B1");
    let pair = [
        "0F0 start; 0F1; 0B0 output gradient of 1B0, 1SEND_B0 behind 1RECV_F1; 0B1 output gradient of 1B1",
        "1F0 input of 0F0; 1B0; 1F1 input of 0F1; 1B1",
    ];
    check_simulated(rows, &costs, Streams::Pair, &pair, "0F0 0F1 1F1 1B1 0B1");
}

/// Checks the causes of recorded events, written `ACTION@START-END` for each rank.
fn check_recorded(rows: &[&str], ranks: u32, expected: &[&str], path: &str) {
    let event = |(rank, text): (u32, &str)| {
        let (action, times) = text.split_once('@').expect("an event");
        let (start, end) = times.split_once('-').expect("two times");
        let [start, end] = [start, end].map(|time| time.parse().expect("a time"));
        Event { rank: Rank::new(rank), action: action.parse().expect("an action"), start, end }
    };
    let events = (0..).zip(rows).flat_map(|(rank, row)| row.split(' ').map(move |text| (rank, text)));
    let timeline = Timeline::new(rows.len() as u32, events.map(event).collect());
    check(&timeline, &causes(&timeline, ranks, &Costs::default(), true), expected, path);
}

#[test]
fn a_recording_shows_delays_and_receives() {
    // Rank 0 sends between its actions. The message of 0F1 is made at 2.9 and received from 3 to 6.
    let rows = ["0F0@0-1 0SEND_F0@1-1.8 0F1@1.9-2.9 0F2@5-6", "1F0@2-3 1RECV_F1@3-6 1F1@6-7"];
    let expected = ["0F0 start; 0F1 delay; 0F2 delay", "1F0 input of 0F0; 1F1 input of 0F1"];
    check_recorded(&rows, 2, &expected, "0F0 0F1 1F1");
    // A receive after which the rank is idle for long is not the cause.
    let rows = ["0F0@0-1 0F1@1-1.5", "1F0@1-2 1RECV_F1@2-2.01 1F1@6-7"];
    check_recorded(&rows, 2, &["0F0 start; 0F1", "1F0 input of 0F0; 1F1 delay"], "0F0 1F0 1F1");
}

#[test]
fn a_forward_that_is_computed_again_waits_for_the_gradient_of_its_backward() {
    let rows = ["0F0@0-1 0B0@8-10", "1F0@1-2 1RECV_B0@2-5 1F0@5-6 1B0@6-8", "2F0@2-3 2B0@3-5"];
    let expected = [
        "0F0 start; 0B0 output gradient of 1B0",
        "1F0 input of 0F0; 1F0 output gradient of 2B0; 1B0",
        "2F0 input of 1F0; 2B0",
    ];
    check_recorded(&rows, 3, &expected, "0F0 1F0 2F0 2B0 1F0 1B0 0B0");
}

#[test]
fn the_last_replica_completes_a_sum() {
    let replica = |late: f64| {
        let end = 3.0 + late;
        format!("0F0@0-1 0B0@{}-{end} 0REDUCE_GRAD@{end}-7 0WAIT_REDUCE_GRAD@{end}-7", 1.0 + late)
    };
    let rows = [replica(0.0), replica(2.0)];
    let rows = rows.each_ref().map(String::as_str);
    let expected = [
        "0F0 start; 0B0; end 0WAIT_REDUCE_GRAD until 7 after 0B0",
        "0F0 start; 0B0 delay; end 0WAIT_REDUCE_GRAD until 7 after 0B0",
    ];
    check_recorded(&rows, 1, &expected, "0F0 0B0");
}

/// Checks that each chain of causes leads back to the start of the step, through actions that end in time, and
/// that the simulation leaves no gap without a cause.
fn check_chains(timeline: &Timeline, ranks: u32, costs: &Costs, name: &str) {
    let found = causes(timeline, ranks, costs, false);
    let all: usize = (0..ranks).map(|rank| cells(timeline, Rank::new(rank)).len()).sum();
    for rank in (0..ranks).map(Rank::new) {
        let own = cells(timeline, rank);
        for (index, cause) in found.of_rank(rank).iter().enumerate() {
            let cell = Cell { rank, index };
            assert_ne!(*cause, Cause::Delay, "{name}: {}", own[index].action);
            let chain: Vec<Cell> =
                std::iter::successors(Some(cell), |&cell| found.before(cell)).take(all + 1).collect();
            assert!(chain.len() <= all, "{name}: a cycle at {}", own[index].action);
            for pair in chain.windows(2) {
                let (later, earlier) = (event(timeline, pair[0]), event(timeline, pair[1]));
                let is_in_time = match found.of(pair[0]) {
                    Cause::Order => (later.start - earlier.end).abs() <= found.slack(),
                    _ => earlier.end <= later.start + found.slack(),
                };
                assert!(is_in_time, "{name}: {} before {}", earlier.action, later.action);
            }
            let first = *chain.last().expect("the action itself");
            let is_gathered = matches!(found.of(first), Cause::Wait(_));
            assert!(
                is_gathered || event(timeline, first).start <= found.slack(),
                "{name}: {:?}",
                found.of(first)
            );
        }
    }
    let path = found.critical_path();
    let last = event(timeline, path[0]).end;
    let end = found.last_wait().map_or(last, |wait| wait.until);
    assert!(
        (end - timeline.start() - timeline.makespan()).abs() <= found.slack(),
        "{name}: the path ends at {end}"
    );
}

#[test]
fn every_gap_of_a_simulation_has_a_cause() {
    let spec = ScheduleSpec { ranks: 3, microbatches: 6, ..ScheduleSpec::default() };
    let slow: Costs = "F=1:2:1,I=1,W=0.5,hop=0.25".parse().expect("costs");
    let mut collectives = slow.clone();
    for stage in &mut collectives.stages {
        *stage = StageCosts { unshard: 0.75, reduce_grad: 1.5, ..*stage };
    }
    for (number, generator) in catalogue().iter().enumerate() {
        let schedule = generate(generator.name, &spec).expect(generator.name);
        let level = [Level::Comms, Level::Full][number % 2];
        let program = lower(&schedule, &LowerConfig::from(level)).expect("a program");
        let costs =
            costs_for(if level == Level::Full { &collectives } else { &slow }, program.placement().stages());
        let run = timed(&program, &costs).expect("it runs");
        check_chains(run.timeline(), 3, &costs, generator.name);
        let streams = [Streams::Edge, Streams::Pair, Streams::Rank][number % 3];
        let communicator = Communicator { streams, sends: Sends::Eager, groups: Groups::Single };
        if let Ok(run) = timed_on(&program, &costs, &communicator) {
            check_chains(run.timeline(), 3, &costs, &format!("{} on {streams}", generator.name));
        }
    }
}

/// Repeats the costs of stages.
fn costs_for(costs: &Costs, stages: u32) -> Costs {
    let own = costs.stages.iter().cycle().take(stages as usize);
    Costs { stages: own.copied().collect(), ..costs.clone() }
}
