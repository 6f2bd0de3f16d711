//! Compares the simulation in the page of `view` with the simulation of the schedule crate: every event of
//! every schedule.

use std::ffi::OsStr;

use serde_json::Value;

use crate::browser::Browser;
use crate::made::{Made, pipewright};

/// An event: rank, action, start and end.
type Event = (u64, String, f64, f64);

fn run(arguments: &str) -> String {
    pipewright(arguments.split(' ').map(OsStr::new))
}

/// Returns the events that the schedule crate simulates for a schedule by name or from a file.
fn expected(schedule: &str, cost: &str) -> Vec<Event> {
    let text = run(&format!("simulate {schedule} --cost {cost} --format csv"));
    let event = |line: &str| {
        // An action may contain a semicolon, but no comma.
        let cells: Vec<&str> = line.split(',').collect();
        let number = |at: usize| cells[at].parse::<f64>().expect("a number");
        (cells[0].parse().expect("a rank"), cells[1].to_owned(), number(2), number(3))
    };
    text.lines().skip(1).map(event).collect()
}

/// Returns the events that the page simulates for the same program.
fn found(browser: &mut Browser, program: &str, costs: &str) -> Vec<Event> {
    let script = format!(
        "simulate(parseProgram({}), {costs}).flatMap((events, rank) => events.map(({{ kind, stage, microbatch, start, end }}) =>
            [rank, stage + kind + (microbatch < 0 ? '' : microbatch), String(start), String(end)]))",
        Value::from(program)
    );
    let events = browser.value(&script);
    let event = |event: &Value| {
        // As texts, because the reader of JSON may round the last digit of a number.
        let number = |at: usize| event[at].as_str().expect("a text").parse::<f64>().expect("a number");
        let action = event[1].as_str().expect("an action").to_owned();
        (event[0].as_u64().expect("a rank"), action, number(2), number(3))
    };
    events.as_array().expect("a list").iter().map(event).collect()
}

#[test]
fn all_events_of_all_schedules_are_equal() {
    let made = Made::view("1f1b --ranks 2 --microbatches 2");
    let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("program.csv");
    let file = file.to_str().expect("a path");
    let list = run("schedule --list");
    let names: Vec<&str> = list.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.len() >= 16, "{names:?}");
    // Both the default costs and uneven ones, with messages that take time.
    let costs = [
        (
            "F=1,I=1,W=1",
            "{ stages: [{ F: 1, I: 1, W: 1, B: 2, unshard: 0, reduce: 0 }], outputs: [], latency: 0, links: {} }",
        ),
        (
            "F=0.7,I=1.3,W=0.4,B=1.9,hop=0.31",
            "{ stages: [{ F: 0.7, I: 1.3, W: 0.4, B: 1.9, unshard: 0, reduce: 0 }], outputs: [], latency: 0.31, links: {} }",
        ),
    ];
    for name in names {
        for level in ["comms", "full"] {
            if name.eq_ignore_ascii_case("forwardonly") && level == "full" {
                continue;
            }
            run(&format!("schedule {name} --ranks 4 --microbatches 8 --level {level} -o {file}"));
            let program = std::fs::read_to_string(file).expect("a program");
            for (cost, in_page) in costs {
                let expected = expected(&format!("--csv {file}"), cost);
                let found = found(&mut browser, &program, in_page);
                assert_eq!(found.len(), expected.len(), "{name}, {level}, {cost}");
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!(found, expected, "{name}, {level}, {cost}");
                }
            }
        }
    }
}

#[test]
fn slices_take_their_shares_and_have_names() {
    let (schedule, cost) =
        ("seq1f1b --ranks 3 --microbatches 4 --slices 3", "F=0.7,I=1.3,W=0.4,B=1.9,hop=0.31,attention=0.4");
    let made = Made::view(&format!("{schedule} --cost {cost}"));
    let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
    let program = run(&format!("schedule {schedule} --level comms"));
    assert_eq!(
        found(&mut browser, &program, "costsOfWhatIf()"),
        expected(&format!("{schedule} --level comms"), cost)
    );
    for (query, matches) in [("1F2.1", 1), ("1F2", 3), ("microbatch 2", 24), ("1F7", 0), ("1F2.3", 0)] {
        assert!(browser.holds(&format!("findMatches('{query}').length === {matches}")), "{query}");
    }
    assert!(browser.holds("nameOf(partsOf(ranks[1], ranks[1].cells, 2)) === '1F0.2'"));
    assert!(browser.holds("placeOfPart({ stage: 1, microbatch: 7 }) === 'stage 1, microbatch 2, slice 1'"));
}

#[test]
fn messages_of_skip_connections_delay_their_users() {
    // Worked out by hand: the message of 6 bytes from stage 0 to stage 2 occupies its link for 6 s from the
    // end of 0F0, the gradient that goes back as well.
    let made = Made::view("1f1b --ranks 2 --microbatches 2");
    let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
    let costs = "{ stages: [{ F: 1, I: 1, W: 1, B: 2, unshard: 0, reduce: 0 }], outputs: [0], latency: 0.5, bandwidth: 1,
        links: {}, skips: [[0, 2, 6]] }";
    let program =
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n2RECV_F0,2F0,2B0,2SEND_B0\n";
    let events = found(&mut browser, program, costs);
    let of = |name: &str| events.iter().find(|event| event.1 == name).map(|event| (event.2, event.3));
    assert_eq!((of("1F0"), of("2F0")), (Some((1.5, 2.5)), Some((7.5, 8.5))));
    assert_eq!(
        (of("2B0"), of("1B0"), of("0B0")),
        (Some((8.5, 10.5)), Some((11.0, 13.0)), Some((17.0, 19.0)))
    );
}

/// Returns a condition of a page: for the program with this number of microbatches, its own, it simulates the
/// memory that the schedule crate has predicted.
pub(crate) fn same_memory(microbatches: u32) -> String {
    format!(
        "sourceOfEvents('', simulate(programFor({microbatches}), costsOfWhatIf())).lanes.every(({{ memory }}, rank) => {{
            const {{ start, held }} = predictedSource.lanes[rank].memory;
            return held.join() === memory.held.join() && start.every((time, at) => Math.abs(time - memory.start[at]) < 1e-6 * whole);
        }}) && predictedSource.lanes.every(({{ memory }}) => memory.held.length > 3)"
    )
}

#[test]
fn memory_of_the_page_is_that_of_the_crate() {
    for name in ["1f1b", "zbvzerobubble", "forwardonly", "seq1f1b"] {
        let made = Made::view(&format!("{name} --ranks 3 --microbatches 6"));
        let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
        assert!(browser.holds(&same_memory(6)), "{name}");
    }
}

/// No command makes a program with frozen stages, so the program and its memory are those of a test of the
/// schedule crate, `a_frozen_stage_keeps_what_its_backwards_need`.
#[test]
fn a_frozen_stage_has_the_memory_of_its_backwards() {
    let made = Made::view("1f1b --ranks 2 --microbatches 2");
    let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
    let memory = browser.value(
        "[memoryOf([[0, 'F'], [1, 'F'], [2, 'F'], [2, 'I'], [1, 'I'], [1, 'W']].map(([stage, kind], at) =>
            ({ kind, stage, microbatch: 0, start: at, end: at + 1 })), [[10, 3, 100, 0]])].map(({ start, held }) => [start, held])[0]",
    );
    // Stage 0 runs forward only, and stage 2 has no weight gradients.
    let expected = [[0, 1, 1, 2, 4, 5, 5, 6], [10, 0, 10, 20, 10, 3, 103, 100]];
    assert_eq!(memory, Value::from(expected.map(|row| Value::from(row.to_vec())).to_vec()));
}

#[test]
fn bandwidth_links_and_collectives_delay_as_in_the_crate() {
    // The rules of links with a bandwidth have no command, so their times are worked out by hand: each
    // message of 10 bytes occupies its link for 2 s and arrives 0.5 s later; gathering takes 3 s.
    let made = Made::view("1f1b --ranks 2 --microbatches 2");
    let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
    let costs = "{ stages: [{ F: 1, I: 1, W: 1, B: 2, unshard: 3, reduce: 4 }], outputs: [10], latency: 9,
        bandwidth: 1, links: { '0 1': { latency: 0.5, bandwidth: 5 } } }";
    let program = "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n";
    let events = found(&mut browser, program, costs);
    let of = |name: &str| events.iter().find(|event| event.1 == name).map(|event| (event.2, event.3));
    assert_eq!(of("0F0"), Some((3.0, 4.0)));
    assert_eq!((of("0SEND_F0"), of("0SEND_F1")), (Some((4.0, 6.0)), Some((6.0, 8.0))));
    assert_eq!((of("1F0"), of("1F1")), (Some((6.5, 7.5)), Some((8.5, 9.5))));
    assert_eq!(of("0WAIT_SEND_F1"), Some((5.0, 8.5)));
    assert_eq!((of("1REDUCE_GRAD"), of("1WAIT_REDUCE_GRAD")), (Some((9.5, 13.5)), Some((9.5, 13.5))));
}

#[test]
fn tensors_leave_and_come_back_as_in_the_crate() {
    // A link of the rank moves one microbatch after another, 2.5 s there and 1.5 s back, and a backward waits
    // for its tensors.
    let made = Made::view("1f1b --ranks 1 --microbatches 2");
    let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
    let costs =
        "{ stages: [{ F: 1, I: 1, W: 1, B: 2, unshard: 0, reduce: 0 }], outputs: [], latency: 0, links: {},
        transfers: [[2.5, 1.5]] }";
    let events = found(&mut browser, "0F0,0OFFLOAD0,0F1,0RELOAD0,0B1,0B0\n", costs);
    let of = |name: &str| events.iter().find(|event| event.1 == name).map(|event| (event.2, event.3));
    assert_eq!((of("0OFFLOAD0"), of("0RELOAD0")), (Some((1.0, 3.5)), Some((3.5, 5.0))));
    assert_eq!((of("0F1"), of("0B1"), of("0B0")), (Some((1.0, 2.0)), Some((2.0, 4.0)), Some((5.0, 7.0))));
}

#[test]
fn all_events_on_a_transport_are_equal() {
    let transports = ["edge", "pair", "rank", "rank --eager 1", "pair --eager 1 --grouped", "rank --grouped"];
    for transport in transports {
        let made = Made::view(&format!("1f1b --ranks 2 --microbatches 2 --transport {transport}"));
        let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
        browser.value("data.view.transport.eager = Array(64).fill(data.view.transport.eager[0]), 0");
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = folder.path().join("program.csv");
        let file = file.to_str().expect("a path");
        for name in ["1f1b", "zbvzerobubble", "dualpipev", "interleaved1f1b"] {
            for pass in [None, Some("wait-send")] {
                run(&format!("schedule {name} --ranks 4 --microbatches 8 --level comms -o {file}"));
                if let Some(pass) = pass {
                    run(&format!("lower {file} --pass {pass} -o {file}"));
                }
                let program = std::fs::read_to_string(file).expect("a program");
                let found = found(
                    &mut browser,
                    &program,
                    "{ stages: [{ F: 0.7, I: 1.3, W: 0.4, B: 1.9, unshard: 0, reduce: 0 }], outputs: [], latency: 0.31, links: {} }",
                );
                let arguments = format!("--csv {file} --transport {transport}");
                let expected = expected(&arguments, "F=0.7,I=1.3,W=0.4,B=1.9,hop=0.31");
                assert_eq!(found, expected, "{name} {pass:?} {transport}");
            }
        }
    }
}
