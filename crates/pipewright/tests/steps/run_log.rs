//! The folder that a program of its own writes: metrics, timelines, and event files.

use std::fs;
use std::path::Path;

use pipewright::pipeline::Pipeline;
use pipewright::train::{RunLog, RunLogError};
use serde_json::Value as Json;

use crate::support::{self, batch, config, program};

const MICROBATCHES: u32 = 4;

fn launch() -> Pipeline {
    support::launch(program("1f1b", 2, MICROBATCHES), &config())
}

/// Writes the metrics of some steps, each with 100 tokens.
fn log(pipeline: &mut Pipeline, log: &mut RunLog, steps: u64) {
    for number in 0..steps {
        let summary = pipeline
            .step(batch(number, MICROBATCHES), batch(100 + number, MICROBATCHES), 1e-2)
            .expect("a step");
        let metrics = log.metrics(&summary, 1e-2, 100);
        log.step(&metrics, &summary).expect("it is written");
    }
}

/// Returns the step and the tokens of each line.
fn lines(folder: &Path, name: &str) -> Vec<(u64, u64)> {
    let text = fs::read_to_string(folder.join(name)).expect("the metrics");
    let line = |line: &str| {
        let figures: Json = serde_json::from_str(line).expect("a line of figures");
        (figures["step"].as_u64().expect("a step"), figures["tokens"].as_u64().expect("tokens"))
    };
    text.lines().map(line).collect()
}

#[test]
fn a_run_continues_after_its_checkpoint_and_keeps_later_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    let mut pipeline = launch();
    let mut first = RunLog::open(&run, 0).expect("a new folder").with_tensorboard().expect("an event file");
    log(&mut pipeline, &mut first, 3);
    first.finish().expect("it is written");
    assert_eq!(lines(&run, "metrics.jsonl"), [(1, 100), (2, 200), (3, 300)]);
    assert!(run.join("timeline.json").exists());
    let names = fs::read_dir(&run).expect("the folder").map(|entry| entry.expect("a file").file_name());
    assert!(names.into_iter().any(|name| name.to_string_lossy().starts_with("events.out.tfevents.")));

    // The run goes back to a checkpoint of step 1. The pipeline counts on, as it would not after a restore.
    let mut resumed = RunLog::open(&run, 1).expect("the folder of the run");
    assert_eq!(lines(&run, "metrics.jsonl"), [(1, 100)]);
    assert_eq!(lines(&run, "metrics.1.jsonl"), [(2, 200), (3, 300)]);
    log(&mut pipeline, &mut resumed, 1);
    assert_eq!(lines(&run, "metrics.jsonl"), [(1, 100), (4, 200)]);
}

#[test]
fn a_folder_of_another_run_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = |done| RunLog::open(folder.path(), done);
    let first = open(0).expect("a new folder");
    assert!(matches!(open(0), Err(RunLogError::HasRun { .. })));
    assert!(matches!(open(5), Err(RunLogError::InUse { .. })));
    drop(first);
    open(5).expect("nobody writes to it");
}

#[cfg(unix)]
#[test]
fn a_folder_that_is_moved_away_ends_the_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let (run, moved) = (folder.path().join("run"), folder.path().join("moved"));
    let mut pipeline = launch();
    let mut log = RunLog::open(&run, 0).expect("a new folder");
    let summary = pipeline.step(batch(1, MICROBATCHES), batch(2, MICROBATCHES), 1e-2).expect("a step");
    let metrics = log.metrics(&summary, 1e-2, 100);
    log.step(&metrics, &summary).expect("it is written");
    fs::rename(&run, &moved).expect("it is moved");
    let _other = RunLog::open(&run, 0).expect("a new folder");
    let error = log.step(&metrics, &summary).expect_err("the folder is another one");
    assert!(matches!(error, RunLogError::Gone { .. }), "{error}");
    assert_eq!(lines(&moved, "metrics.jsonl").len(), 1);
    assert_eq!(lines(&run, "metrics.jsonl").len(), 0);
}

#[cfg(unix)]
#[test]
fn pipes_and_cut_lines_in_the_place_of_metrics_stop_no_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics.jsonl");
    // The last line ends inside a character.
    fs::write(&path, b"{\"step\":1,\"tokens\":100}\n{\"step\":2,\"\xc3").expect("a file");
    drop(RunLog::open(folder.path(), 1).expect("a folder with a cut line"));
    assert_eq!(lines(folder.path(), "metrics.jsonl"), [(1, 100)]);
    fs::remove_file(&path).expect("it is removed");
    let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
    assert!(made.success());
    let error = RunLog::open(folder.path(), 1).map(drop).expect_err("a pipe").to_string();
    assert!(error.contains("a device or a pipe"), "{error}");
}

#[test]
fn a_reopened_run_counts_what_it_has_counted() {
    let check = |unit: &str, expected: Option<&str>| {
        let mut pipeline = launch();
        let folder = tempfile::tempdir().expect("a folder");
        let mut first = RunLog::open(folder.path(), 0).expect("a new folder").counting(unit);
        log(&mut pipeline, &mut first, 1);
        drop(first);
        let mut resumed = RunLog::open(folder.path(), 1).expect("the folder of the run");
        log(&mut pipeline, &mut resumed, 1);
        let text = fs::read_to_string(folder.path().join("metrics.jsonl")).expect("the metrics");
        let units: Vec<Option<String>> = text
            .lines()
            .map(|line| {
                let figures: Json = serde_json::from_str(line).expect("a line of figures");
                figures["unit"].as_str().map(str::to_owned)
            })
            .collect();
        assert_eq!(units, vec![expected.map(str::to_owned); 2], "{unit}");
    };
    check("tokens", None);
    check("frames", Some("frames"));
    check("samples", Some("samples"));
}
