//! Tests of runs whose kept inputs leave memory: the same figures, no file that is left, and refusals.

use std::fs;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use assert_cmd::Command;
use tempfile::TempDir;

use crate::scratch;

fn folder() -> TempDir {
    scratch::folder(&scratch::small(2, 4, 4))
}

fn train(folder: &Path, overrides: &[&str]) -> Output {
    let set = overrides.iter().flat_map(|argument| ["--set", argument]);
    run(folder, &["train", "small.toml"].into_iter().chain(set).collect::<Vec<_>>())
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("pipewright").expect("the binary is built");
    command.current_dir(folder).args(arguments).timeout(Duration::from_secs(240));
    command.output().expect("the binary starts")
}

/// Trains with these overrides. Returns the loss and gradient norm of each step.
fn figures(folder: &TempDir, overrides: &[&str]) -> Vec<(String, String)> {
    let output = train(folder.path(), overrides);
    assert_eq!(output.status.code(), Some(0), "{overrides:?}: {}", String::from_utf8_lossy(&output.stderr));
    let metrics = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("metrics");
    // A busy machine may also make a rank slow, which is a line of its own.
    let figure = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).expect("a line is an object");
        let is_step = value.get("event").is_none();
        is_step.then(|| (value["loss"].to_string(), value["grad_norm"].to_string()))
    };
    assert_eq!(left_in(&folder.path().join("out")), 0, "{overrides:?}");
    metrics.lines().filter_map(figure).collect()
}

/// Returns the number of files of tensors in a folder.
fn left_in(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").file_name());
    entries.filter(|name| name.to_string_lossy().starts_with("offload-")).count()
}

const BLOCK: &str = "pipeline.recompute=block";
const FILE: &str = "pipeline.offload=file";

#[test]
fn offloading_changes_no_figure_and_leaves_no_file() {
    let folder = folder();
    let tensor_ranks = "mesh.tensor_parallel=2";
    let split = figures(&folder, &[tensor_ranks]);
    assert_eq!(figures(&folder, &[tensor_ranks, BLOCK, FILE]), split);
    for schedule in ["gpipe", "1f1b", "zb-h1", "zbvzerobubble"] {
        let schedule = format!("pipeline.schedule={schedule}");
        let expected = figures(&folder, &[&schedule]);
        let some = "pipeline.offload={ to = \"file\", stages = [0], keep = 1 }";
        for offload in [FILE, some] {
            assert_eq!(figures(&folder, &[&schedule, BLOCK, offload]), expected, "{schedule} {offload}");
        }
    }
    let timeline = fs::read_to_string(folder.path().join("out/timeline.json")).expect("a timeline");
    assert!(
        timeline.contains("\"offload\"") && timeline.contains("\"reload\""),
        "the last run has moved tensors"
    );
}

#[test]
fn a_long_run_leaves_no_file() {
    let folder = folder();
    let place = folder.path().join("scratch");
    let set = format!("pipeline.offload_folder={}", toml::Value::String(place.display().to_string()));
    let steps = figures(&folder, &["run.steps=200", "pipeline.schedule=gpipe", BLOCK, FILE, &set]);
    assert_eq!(steps.len(), 200);
    assert_eq!(fs::read_dir(&place).expect("the folder is made").count(), 0);
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let folder = folder();
    let file = folder.path().join("small.toml");
    let set = format!("pipeline.offload_folder={}", toml::Value::String(file.display().to_string()));
    let output = train(folder.path(), &[BLOCK, FILE, &set]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let expected = format!("the inputs of forwards cannot be written to `{}`", file.display());
    assert!(said.contains(&expected), "{said}");
}

#[test]
fn a_configuration_that_offloads_is_measured() {
    let folder = folder();
    let arguments =
        ["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml", "--set", BLOCK, "--set", FILE];
    let output = run(folder.path(), &arguments);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn rows_of_a_file_move_what_the_settings_say() {
    let folder = folder();
    let lower = |arguments: &[&str]| {
        let output = run(folder.path(), &[&["lower"], arguments].concat());
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let rows = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n";
    fs::write(folder.path().join("plain.csv"), rows).expect("a file");
    lower(&["plain.csv", "--pass", "send-recv", "-o", "messages.csv"]);
    lower(&["messages.csv", "--pass", "offload", "-o", "moving.csv"]);
    let refuse = |overrides: &[&str], expected: &str| {
        let set = overrides.iter().flat_map(|argument| ["--set", argument]);
        let output = run(folder.path(), &["check", "small.toml"].into_iter().chain(set).collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(expected), "{overrides:?}: {said}");
    };
    let [messages, moving] = ["pipeline.schedule=messages.csv", "pipeline.schedule=moving.csv"];
    let unmoved = "messages.csv: the schedule already communicates and moves no tensors out of memory";
    refuse(&[messages, BLOCK, FILE], unmoved);
    let placeless = "moving.csv: the program has 0OFFLOAD0, and no place is given to which it moves tensors";
    refuse(&[moving, BLOCK], placeless);
    let tape = "moving.csv: 1OFFLOAD0 moves the inputs that a recomputed forward keeps, and its forward is not recomputed: it \
                keeps a tape, which belongs to Burn";
    refuse(&[moving, "pipeline.recompute=[0]", FILE], tape);
    assert_eq!(figures(&folder, &[moving, BLOCK, FILE]), figures(&folder, &[messages]));
}
