//! Tests of runs that continue by themselves after a fault: the results have the bits of an undisturbed run, and a
//! fault that repeats ends the run.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

use crate::run::{Run, tensors};

/// The settings of all runs: four ranks as threads, and a checkpoint after every second step.
const SETTINGS: [&str; 4] =
    ["run.steps=8", "run.checkpoint_every=2", "pipeline.ranks=2", "run.deadline_seconds=2"];

/// Trains with injected faults.
fn train(run: &Run, faults: &str, set: &[&str]) -> Output {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    command.current_dir(run.path(".")).env("PIPEWRIGHT_FAULT", faults).args(["train", "small.toml"]);
    command.args(SETTINGS.iter().chain(set).flat_map(|set| ["--set", *set]));
    command.output().expect("the binary starts")
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the restarts in the metrics: the step that failed, and the last step before it that counts.
fn restarts(run: &Run) -> Vec<(u64, u64)> {
    let metrics = fs::read_to_string(run.path("out/metrics.jsonl")).expect("a run writes its metrics");
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("an object"));
    let events = lines.filter(|line| line["event"] == "restart");
    events
        .map(|event| {
            (event["failed_step"].as_u64().expect("a step"), event["step"].as_u64().expect("a step"))
        })
        .collect()
}

/// Trains with faults, and compares the results with those of an undisturbed run.
fn check(faults: &str, set: &[&str], expected: &[(u64, u64)]) -> String {
    let (undisturbed, run) = (Run::new(), Run::new());
    undisturbed.train(&[&SETTINGS[..], set].concat());
    let output = train(&run, faults, &[set, &["run.restarts=4"]].concat());
    let words = words(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert_eq!(restarts(&run), expected, "{words}");
    assert_eq!(run.figures(), undisturbed.figures());
    let last = "out/checkpoints/step-00000008";
    assert!(
        tensors(&run.path(last)) == tensors(&undisturbed.path(last)),
        "the parameters and the optimizer's state"
    );
    assert!(!run.path("out/restart.json").exists());
    words
}

#[test]
fn a_rank_that_panics_costs_the_steps_since_the_checkpoint() {
    let words = check("panic:1:6", &[], &[(6, 4)]);
    let sentence = "PIPEWRIGHT_FAULT asks for this panic; the run continues from step 4 (restart 1 of 4)";
    assert_eq!(words.matches(sentence).count(), 1, "{words}");
    assert!(
        !words.contains("error:") && !words.contains("resuming from") && !words.contains("moved"),
        "{words}"
    );
}

#[test]
fn a_run_without_a_checkpoint_begins_again() {
    let words = check("panic:0:2", &[], &[(2, 0)]);
    assert!(words.contains("the run continues again from step 1 (restart 1 of 4)"), "{words}");
}

#[test]
fn several_faults_in_one_run_are_survived() {
    // The second fault comes before the next checkpoint.
    check("panic:1:3,panic:0:4,panic:1:8", &["mesh.data_parallel=2"], &[(3, 2), (4, 2), (8, 6)]);
}

#[test]
fn a_rank_that_hangs_is_replaced_after_the_deadline() {
    check("hang:0:5", &[], &[(5, 4)]);
}

#[test]
fn a_fault_that_repeats_ends_the_run_with_both_reports() {
    let run = Run::new();
    let output = train(&run, "panic:1:5:9", &["run.restarts=4"]);
    let words = words(&output);
    assert_eq!(output.status.code(), Some(4), "{words}");
    assert_eq!(words.matches("the schedule around the failure").count(), 2, "{words}");
    assert!(words.contains("the failure repeats at the same step with the same cause"), "{words}");
    assert_eq!(restarts(&run), [(5, 4)]);
}

#[test]
fn a_run_ends_when_its_restarts_are_used() {
    let run = Run::new();
    let output = train(&run, "panic:1:3,panic:1:5", &["run.restarts=1"]);
    let words = words(&output);
    assert_eq!(output.status.code(), Some(4), "{words}");
    assert!(
        words.contains("the run has used its 1 restart, so it ends") && words.contains("error: step 5"),
        "{words}"
    );
}

#[test]
fn a_run_without_restarts_ends_at_its_first_fault() {
    let run = Run::new();
    let output = train(&run, "panic:1:3", &[]);
    let words = words(&output);
    assert_eq!(output.status.code(), Some(4), "{words}");
    assert!(!words.contains("continues"), "{words}");
    let output = train(&run, "panic:x", &[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn the_report_has_the_restarts() {
    let run = Run::new();
    train(&run, "panic:1:6", &["run.restarts=1"]);
    assert_eq!(run.command(&["report", "out", "-o", "page.html"]).status.code(), Some(0));
    let page = fs::read_to_string(run.path("page.html")).expect("a page");
    assert!(
        page.contains("\"failed_step\":6") && page.contains("the run continues from step 4"),
        "the data of the page"
    );
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_build_without_mpi_says_how_to_build_with_it() {
    let run = Run::new();
    let output = run.command(&["launch", "--ranks", "2", "--", "train", "small.toml"]);
    let words = words(&output);
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("cargo build --release --features mpi"), "{words}");
}
