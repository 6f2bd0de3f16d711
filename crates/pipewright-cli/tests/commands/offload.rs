//! Tests of runs whose kept inputs leave memory: the same figures, no file that is left, and refusals.

use std::fs;
use std::path::Path;

use crate::run::{Figures, Run};
use crate::scratch;

fn folder() -> Run {
    Run::of(&scratch::small(2, 4, 4))
}

/// Trains with these overrides. Returns the loss and gradient norm of each step.
fn figures(run: &Run, set: &[&str]) -> Vec<Figures> {
    run.train(set);
    assert_eq!(left_in(&run.out()), 0, "{set:?}");
    run.figures()
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
    let run = folder();
    let tensor_ranks = "mesh.tensor_parallel=2";
    let split = figures(&run, &[tensor_ranks]);
    assert_eq!(figures(&run, &[tensor_ranks, BLOCK, FILE]), split);
    for schedule in ["gpipe", "1f1b", "zb-h1", "zbvzerobubble"] {
        let schedule = format!("pipeline.schedule={schedule}");
        let expected = figures(&run, &[&schedule]);
        let some = "pipeline.offload={ to = \"file\", stages = [0], keep = 1 }";
        for offload in [FILE, some] {
            assert_eq!(figures(&run, &[&schedule, BLOCK, offload]), expected, "{schedule} {offload}");
        }
    }
    let timeline = run.read("out/timeline.json");
    assert!(
        timeline.contains("\"offload\"") && timeline.contains("\"reload\""),
        "the last run has moved tensors"
    );
}

#[test]
fn a_long_run_leaves_no_file() {
    let run = folder();
    let place = run.path("scratch");
    let set = format!("pipeline.offload_folder={}", toml::Value::String(place.display().to_string()));
    let steps = figures(&run, &["run.steps=200", "pipeline.schedule=gpipe", BLOCK, FILE, &set]);
    assert_eq!(steps.len(), 200);
    assert_eq!(fs::read_dir(&place).expect("the folder is made").count(), 0);
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let run = folder();
    let file = run.path("small.toml");
    let set = format!("pipeline.offload_folder={}", toml::Value::String(file.display().to_string()));
    let expected = format!("the inputs of forwards cannot be written to `{}`", file.display());
    run.refuse(&["train", "small.toml"], &[BLOCK, FILE, &set], &expected);
}

#[test]
fn a_configuration_that_offloads_is_measured() {
    let run = folder();
    run.succeed(&["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"], &[BLOCK, FILE]);
}

#[test]
fn rows_of_a_file_move_what_the_settings_say() {
    let run = folder();
    let lower = |arguments: &[&str]| run.print(&[&["lower"], arguments].concat());
    let rows = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n";
    run.write("plain.csv", rows);
    lower(&["plain.csv", "--pass", "send-recv", "-o", "messages.csv"]);
    lower(&["messages.csv", "--pass", "offload", "-o", "moving.csv"]);
    let refuse = |set: &[&str], expected: &str| run.refuse(&["check", "small.toml"], set, expected);
    let [messages, moving] = ["pipeline.schedule=messages.csv", "pipeline.schedule=moving.csv"];
    let unmoved = "messages.csv: the schedule already communicates and moves no tensors out of memory";
    refuse(&[messages, BLOCK, FILE], unmoved);
    let placeless = "moving.csv: the program has 0OFFLOAD0, and no place is given to which it moves tensors";
    refuse(&[moving, BLOCK], placeless);
    let tape = "moving.csv: 1OFFLOAD0 moves the inputs that a recomputed forward keeps, and its forward is not recomputed: it \
                keeps a tape, which belongs to Burn";
    refuse(&[moving, "pipeline.recompute=[0]", FILE], tape);
    assert_eq!(figures(&run, &[moving, BLOCK, FILE]), figures(&run, &[messages]));
}
