//! Layers move between processes with the bits of threads whose layers stay, and a process that is lost in a move costs the
//! steps since the newest checkpoint. The tests have the processors to themselves: a rank is slow in comparison with its first
//! steps, in which nothing else may slow it.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::launch::launch;
use super::turns::OnlyTurn;
use super::{figures, folder, left_running, processes_command, restarts, train_on_threads, words};

/// The settings of all runs.
const SETTINGS: [&str; 5] = [
    "run.steps=50",
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "model.num_hidden_layers=6",
    "run.deadline_seconds=5",
];

/// Rank 1 is slow after the steps that measure its usual times, and later rank 0. So layers move twice.
const SLOW: &str = "slow:1:12:12,slow:0:30:15";

fn undisturbed() -> Vec<[String; 5]> {
    let folder = folder();
    train_on_threads(folder.path(), &SETTINGS)
}

fn moves(folder: &Path) -> Vec<Value> {
    let metrics = fs::read_to_string(folder.join("out/metrics.jsonl")).expect("metrics");
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines.filter(|line| line["event"] == "layer_move").collect()
}

#[test]
fn layers_move_between_processes() {
    let _turn = OnlyTurn::begin();
    let undisturbed = undisturbed();
    for other in ["pipeline.schedule=1f1b", "pipeline.schedule=zbvzerobubble"] {
        let folder = folder();
        let set = [&SETTINGS[..], &["run.replan=when-slow", other]].concat();
        let mut command = processes_command(folder.path(), 2, &set);
        let output = command.env("PIPEWRIGHT_FAULT", SLOW).output().expect("mpirun is installed with MPI");
        let said = words(&output);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let moves = moves(folder.path());
        assert!(moves.len() >= 2, "{moves:?}: {said}");
        for moved in moves {
            let sentence = format!("step {}: layer", moved["step"]);
            assert_eq!(said.matches(&sentence).count(), 1, "one process reports: {said}");
        }
        assert_eq!(figures(folder.path()), undisturbed, "{other}: {said}");
    }
}

#[test]
fn a_process_that_is_killed_in_a_move_costs_the_steps_since_the_checkpoint() {
    let _turn = OnlyTurn::begin();
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    fs::write(path.join("fault"), "").expect("the scratch folder takes files");
    let set = [&SETTINGS[..], &["run.replan=when-slow", "run.checkpoint_every=10"]].concat();
    let mut command = launch(&path, &[], &set);
    command.env("PIPEWRIGHT_FAULT", format!("{SLOW},kill-in-move:1:file=fault"));
    let output = command.output().expect("it starts");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(!path.join("fault").exists(), "the fault has happened");
    let [restart] = &restarts(&path)[..] else { panic!("one restart: {said}") };
    let cause = restart["cause"].as_str().expect("a text");
    assert!(cause.contains("rank 1 is lost") || cause.contains("rank 1 has sent no heartbeat"), "{cause}");
    assert_eq!(figures(&path), undisturbed(), "{said}");
    assert_eq!(left_running(&path), 0, "nothing is left running");
}

/// Without `launch`, the other process ends with one report.
#[test]
fn a_run_ends_when_a_process_is_killed_in_a_move() {
    let _turn = OnlyTurn::begin();
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    fs::write(path.join("fault"), "").expect("the scratch folder takes files");
    let set = [&SETTINGS[..], &["run.replan=when-slow"]].concat();
    let mut command = processes_command(&path, 2, &set);
    let began = Instant::now();
    let output = command.env("PIPEWRIGHT_FAULT", format!("{SLOW},kill-in-move:1:file=fault")).output();
    let output = output.expect("mpirun is installed with MPI");
    let said = words(&output);
    assert!(!path.join("fault").exists() && !output.status.success(), "{said}");
    assert_eq!(said.matches("error:").count(), 1, "one report: {said}");
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}: {said}", began.elapsed());
    assert_eq!(left_running(&path), 0, "nothing is left running");
}
