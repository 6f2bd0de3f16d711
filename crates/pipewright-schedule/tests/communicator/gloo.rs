//! Verdicts on programs that PyTorch 2.15 has run on Gloo, with what happened there.
//!
//! `bench/peer/run_on_gloo.py golden` prints the programs: for each schedule, order, outcome and combination of
//! verdicts the smallest one. `docs/communicators.md` describes the runs.

use std::collections::BTreeSet;

use pipewright_schedule::Level;
use pipewright_schedule::communicator::{Communicator, Groups, Streams, judge};
use pipewright_schedule::csv::parse_program;
use serde_json::Value;

const PROGRAMS: &str = include_str!("../golden/gloo_2_15.json");

/// Returns the communicator of a name in the golden data.
fn communicator(name: &str) -> Communicator {
    let (streams, groups) = match name.strip_suffix(", grouped") {
        Some(streams) => (streams, Groups::Consecutive),
        None => (name, Groups::Single),
    };
    Communicator { streams: streams.parse().expect("a transport"), groups, ..Communicator::default() }
}

fn text<'a>(program: &'a Value, key: &str) -> &'a str {
    program[key].as_str().expect("a text")
}

#[test]
fn verdicts_name_what_happens_on_gloo() {
    let programs: Value = serde_json::from_str(PROGRAMS).expect("golden data is JSON");
    let programs = programs.as_array().expect("a list of programs");
    let mut seen = BTreeSet::new();
    for program in programs {
        let title =
            format!("{} with {} ranks, {}", program["schedule"], program["ranks"], program["options"]);
        let rows = parse_program(text(program, "program")).expect("golden rows parse");
        let level = if text(program, "program").contains("UNSHARD") { Level::Full } else { Level::Comms };
        for (name, expected) in program["verdicts"].as_object().expect("verdicts by transport") {
            let verdict = judge(&rows, level, &communicator(name)).expect("the program is complete");
            assert_eq!(Some(verdict.word()), expected.as_str(), "{title}: {name}");
        }
        let verdict = judge(&rows, level, &communicator(Streams::Edge.name())).expect("as above");
        let outcome = match (verdict.cycle.is_empty(), verdict.crossed) {
            (false, _) => "hang",
            (true, 0) => "right",
            (true, _) => "wrong",
        };
        assert_eq!(outcome, text(program, "word"), "{title}");
        seen.insert(outcome);
    }
    assert_eq!(seen, BTreeSet::from(["hang", "right", "wrong"]), "every outcome has a program");
}
