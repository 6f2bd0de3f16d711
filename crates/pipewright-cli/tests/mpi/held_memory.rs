//! Tests of the memory of processes: it does not grow from step to step.

use std::fs;

use super::{folder, processes_command, schedules, words};

/// Compares the greatest peak of each of two processes at the end of a run with that after a few steps.
fn check_drift(schedule: &str, steps: usize, overrides: &[&str]) {
    let folder = folder();
    let run = [format!("pipeline.schedule={schedule}"), format!("run.steps={steps}")];
    let overrides = [&run.each_ref().map(String::as_str)[..], overrides].concat();
    let mut command = processes_command(folder.path(), 2, &overrides);
    // A second for each step is enough on a busy machine too.
    let deadline = steps.max(600).to_string();
    let output = command.env("MPIEXEC_TIMEOUT", deadline).output().expect("mpirun is installed with MPI");
    assert_eq!(output.status.code(), Some(0), "{schedule}: {}", words(&output));
    let metrics =
        fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("a run writes its metrics");
    let lines = metrics.lines().map(|line| serde_json::from_str(line).expect("a line is an object"));
    // On a busy machine, a rank can be named as slow.
    let of_steps = lines.filter(|line: &serde_json::Value| line.get("event").is_none());
    let peaks = |line: serde_json::Value| -> Vec<u64> {
        line["peak_bytes"].as_array().expect("a list").iter().filter_map(serde_json::Value::as_u64).collect()
    };
    let peaks: Vec<Vec<u64>> = of_steps.map(peaks).collect();
    assert_eq!(peaks.len(), steps, "{schedule}");
    let greatest = |steps: &[Vec<u64>], rank: usize| steps.iter().map(|peaks| peaks[rank]).max();
    for rank in 0..2 {
        let [early, late] =
            [&peaks[10..30], &peaks[steps - 20..]].map(|steps| greatest(steps, rank).expect("steps"));
        // Buffers for frames that wait for a rank are reused, so the peak stays about the same.
        assert!(early.abs_diff(late) <= 64 << 10, "{schedule}, rank {rank}: {early} bytes, then {late}");
    }
}

#[test]
fn what_a_process_holds_does_not_drift() {
    check_drift("1f1b", 200, &[]);
}

#[test]
#[ignore = "takes an hour"]
fn what_a_process_holds_after_ten_thousand_steps_is_what_it_holds_after_ten() {
    let schedules = schedules();
    let whole = schedules.iter().filter(|name| !["seq1f1b", "vocab1f1b"].contains(&name.as_str()));
    for schedule in whole {
        check_drift(schedule, 10_000, &["model.num_hidden_layers=2", "pipeline.microbatches=4"]);
    }
}
