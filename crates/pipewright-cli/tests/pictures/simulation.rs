//! Compares the times of the page of `view` at other costs with the simulation of the schedule crate: every
//! event of every schedule.

use std::ffi::OsStr;

use pipewright_schedule::costs::{StageCosts, StageSizes};
use pipewright_schedule::lower::OffloadConfig;
use pipewright_schedule::simulate::{UNIT, timed};
use pipewright_schedule::{
    Costs, Level, LowerConfig, Recompute, ScheduleSpec, TrainedStages, generate, lower,
};
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

/// Returns the events of the page's program at the costs of its panel.
fn found(browser: &mut Browser) -> Vec<Event> {
    let script = "(() => {
        const program = programFor(whatIf.microbatches), { times } = timesAt(program, costsOfWhatIf(program));
        const events = program.events.flat().map(({ rank, name, start, end }) => [rank, name, times[start], times[end]]);
        events.sort((one, other) => one[0] - other[0] || one[2] - other[2]);
        return events.map(([rank, name, start, end]) => [rank, name, String(start), String(end)]);
    })()";
    let events = browser.value(script);
    let event = |event: &Value| {
        // As texts, because the reader of JSON may round the last digit of a number.
        let number = |at: usize| event[at].as_str().expect("a text").parse::<f64>().expect("a number");
        let action = event[1].as_str().expect("an action").to_owned();
        (event[0].as_u64().expect("a rank"), action, number(2), number(3))
    };
    events.as_array().expect("a list").iter().map(event).collect()
}

/// The costs of the changed panel.
const UNEVEN: &str = "F=0.7,I=1.3,W=0.4,B=1.9,hop=0.31";

/// Changes the panel from the default costs to [`UNEVEN`].
const CHANGE: &str = "whatIf.factors.forEach((factors) => Object.assign(factors, { F: 0.7, I: 1.3, W: 0.4, B: 0.95 })), whatIf.latency = 0.31, 0";

/// Compares the page of a file with the simulation, at its own costs and at changed ones.
fn compare(file: &str, transport: &str) {
    let made = Made::view(&format!("{file}{transport}"));
    let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
    for (cost, change) in [("F=1,I=1,W=1", "0"), (UNEVEN, CHANGE)] {
        browser.value(change);
        let expected = expected(&format!("--csv {file}{transport}"), cost);
        let found = found(&mut browser);
        assert_eq!(found.len(), expected.len(), "{file}{transport}, {cost}");
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found, expected, "{file}{transport}, {cost}");
        }
    }
}

#[test]
fn all_events_of_all_schedules_are_equal() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let list = run("schedule --list");
    let names: Vec<&str> = list.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.len() >= 16, "{names:?}");
    for (number, name) in names.into_iter().enumerate() {
        let is_forward_only = name.eq_ignore_ascii_case("forwardonly");
        let level = if number % 2 == 0 || is_forward_only { "comms" } else { "full" };
        let file = folder.path().join(format!("{name}.csv"));
        let file = file.to_str().expect("a path");
        run(&format!("schedule {name} --ranks 4 --microbatches 8 --level {level} -o {file}"));
        compare(file, "");
    }
}

#[test]
fn slices_take_their_shares_and_have_names() {
    let (schedule, cost) =
        ("seq1f1b --ranks 3 --microbatches 4 --slices 3", "F=0.7,I=1.3,W=0.4,B=1.9,hop=0.31,attention=0.4");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("slices.csv");
    let file = file.to_str().expect("a path");
    run(&format!("schedule {schedule} --level comms -o {file}"));
    let made = Made::view(&format!("{file} --slices 3 --cost {cost}"));
    let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
    assert_eq!(found(&mut browser), expected(&format!("--csv {file} --slices 3"), cost));
    for (query, matches) in [("1F2.1", 1), ("1F2", 3), ("microbatch 2", 18), ("1F7", 0), ("1F2.3", 0)] {
        assert!(browser.holds(&format!("findMatches('{query}').length === {matches}")), "{query}");
    }
    assert!(browser.holds("nameOf(partsOf(ranks[1], ranks[1].cells, 2)) === '1F0.2'"));
    assert!(browser.holds("placeOfPart({ stage: 1, microbatch: 7 }) === 'stage 1, microbatch 2, slice 1'"));
}

/// Returns a condition of a page: for the program with this number of microbatches, its own, it simulates the
/// memory that the schedule crate has predicted. Changes at one time have no order, so what is added and what is freed
/// then are compared.
pub(crate) fn same_memory(microbatches: u32) -> String {
    format!(
        "(() => {{
            const changes = ({{ start, held }}) => held.reduce((all, value, at) => {{
                const change = value - (held[at - 1] ?? 0), isNew = !(start[at] - all.at(-1)?.time < 1e-6 * whole);
                if (isNew) all.push({{ time: start[at], added: 0, freed: 0 }});
                all.at(-1)[change > 0 ? 'added' : 'freed'] += Math.abs(change);
                return all;
            }}, []).filter(({{ added, freed }}) => added + freed > 0);
            const program = programFor({microbatches}), found = runProgram('', program, costsOfWhatIf(program)).lanes;
            return predictedSource.lanes.every(({{ memory }}, rank) => {{
                const expected = changes(memory), own = changes(found[rank].memory);
                return expected.length === own.length && expected.length > 3 && expected.every(({{ time, added, freed }}, at) =>
                    added === own[at].added && freed === own[at].freed && Math.abs(time - own[at].time) < 1e-6 * whole);
            }});
        }})()"
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

/// Compares the page of a program that no file holds with the simulation, events and memory.
#[test]
fn offloads_collectives_and_frozen_stages_are_equal() {
    let spec = ScheduleSpec { ranks: 3, microbatches: 6, ..ScheduleSpec::default() };
    let schedule = generate("1f1b", &spec).expect("a schedule");
    let comms = LowerConfig::from(Level::Comms);
    let offload = Some(OffloadConfig::all(Recompute::Stage));
    let trained = TrainedStages::of(&[false, true, false]);
    let mut linked: Costs = "hop=0.25".parse().expect("costs");
    linked.link.bandwidth = 16.0;
    linked.sizes = vec![StageSizes { activation: 8, stash: 3, gradient: 16, output: 4, offload: 2, ..UNIT }];
    let mut collectives = linked.clone();
    collectives.stages[0] = StageCosts { unshard: 0.75, reduce_grad: 1.5, ..collectives.stages[0] };
    let mut moved = Costs { recompute: Recompute::Stage, ..linked.clone() };
    moved.stages[0] = StageCosts { offload: Some(0.75), reload: Some(1.25), ..moved.stages[0] };
    let cases = [
        (LowerConfig { offload, ..comms.clone() }, &moved),
        (LowerConfig::from(Level::Full), &collectives),
        (LowerConfig { trained, ..comms }, &linked),
    ];
    for (passes, costs) in cases {
        let program = lower(&schedule, &passes).expect("a program");
        let run = timed(&program, costs).expect("it runs");
        let event = |event: &pipewright_schedule::Event| {
            (u64::from(event.rank.get()), event.action.to_string(), event.start, event.end)
        };
        let expected: Vec<Event> = run.timeline().events().iter().map(event).collect();
        let made = Made::explained(&program, costs, &[]);
        let Some(mut browser) = Browser::open(&made.path(), 800, 600) else { return };
        assert_eq!(found(&mut browser), expected, "{passes:?}");
        assert!(browser.holds(&same_memory(6)), "{passes:?}");
    }
}

#[test]
fn all_events_on_a_transport_are_equal() {
    let transports = ["edge", "pair", "rank", "rank --eager 1", "pair --eager 1 --grouped", "rank --grouped"];
    let folder = tempfile::tempdir().expect("a scratch folder");
    for (name, is_waiting) in
        [("1f1b", false), ("zbvzerobubble", true), ("dualpipev", false), ("interleaved1f1b", true)]
    {
        let file = folder.path().join(format!("{name}.csv"));
        let file = file.to_str().expect("a path");
        run(&format!("schedule {name} --ranks 4 --microbatches 8 --level comms -o {file}"));
        if is_waiting {
            run(&format!("lower {file} --pass wait-send -o {file}"));
        }
        for transport in transports {
            compare(file, &format!(" --transport {transport}"));
        }
    }
}
