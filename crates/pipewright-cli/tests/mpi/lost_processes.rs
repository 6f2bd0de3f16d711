//! Tests of processes that are slow, stopped or killed, or get a signal: one process reports it, and all end.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::{
    figures, folder, left_running, mpirun, pipewright, process_of, processes_command, signal,
    train_on_threads, with_overrides, words,
};

#[test]
fn a_slow_process_is_named() {
    let folder = folder();
    let set = ["run.steps=28", "pipeline.ranks=2", "pipeline.microbatches=2", "model.num_hidden_layers=4"];
    // Actions take 20 ms longer in all steps, so that the load of the machine seldom doubles their time, and 140 ms longer on
    // the slow rank from step 15 on.
    let faults = format!("slow:0:1:28,slow:1:1:28{}", ",slow:1:15:28".repeat(6));
    let mut command = processes_command(folder.path(), 2, &set);
    // On a busy machine, the other process is also slow in some steps, and a process is named only after five steps in a row in
    // which it alone is slow.
    let output = command.env("PIPEWRIGHT_FAULT", &faults).output().expect("mpirun is installed with MPI");
    let words = words(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert_eq!(words.matches(": rank 1 is slow: its actions take ").count(), 1, "{words}");
    let metrics = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("metrics");
    assert!(metrics.contains("{\"event\":\"slow_rank\""), "{metrics}");
}

#[test]
fn a_signal_to_one_process_stops_all_with_a_checkpoint() {
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    let run = endless(&path, 20);
    signal(process_of(1, &path), "TERM");
    let output = run.wait_with_output().expect("mpirun ends");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert_eq!(said.matches("stopped by a signal after step ").count(), 1, "{said}");
    let steps = figures(&path).len();
    let saved = path.join(format!("out/checkpoints/step-{steps:08}/manifest.json"));
    assert!(saved.exists(), "{} of {said}", saved.display());
    assert_eq!(left_running(&path), 0, "nothing is left running");
}

/// Starts a run that does not end by itself.
fn endless(folder: &Path, deadline: u32) -> Child {
    let mut command = mpirun(folder);
    command.args(["-n", "3"]).arg(pipewright());
    let deadline = format!("run.deadline_seconds={deadline}");
    with_overrides(&mut command, &["pipeline.ranks=3", "run.steps=1000000", &deadline]);
    command.args(["--set", "pipeline.transport=mpi"]);
    command.stderr(Stdio::piped()).spawn().expect("mpirun is installed with MPI")
}

/// The evaluation after step 2 takes minutes. All processes end it after the same batch, and the resumed run makes
/// up for it.
#[test]
fn a_signal_to_one_process_ends_an_evaluation_of_all() {
    const SET: [&str; 4] =
        ["pipeline.ranks=2", "run.steps=3", "run.eval_every=2", "data.validation=held.txt"];
    let folder = folder();
    let path = folder.path().canonicalize().expect("a folder");
    let held = "a slow green turtle walks under the fence and into the pond ".repeat(30_000);
    fs::write(path.join("held.txt"), held).expect("the scratch folder takes files");
    let mut command = processes_command(&path, 2, &SET);
    let run = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("mpirun");
    let process = process_of(1, &path);
    std::thread::sleep(Duration::from_millis(500));
    signal(process, "TERM");
    let output = run.wait_with_output().expect("it ends");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert_eq!(said.matches("a signal to another process of the run has arrived").count(), 1, "{said}");
    let stopped = figures(&path);
    assert!(stopped.len() == 2 && stopped[1][4] == "null", "{stopped:?}");
    let mut resumed = mpirun(&path);
    resumed.args(["-n", "2"]).arg(pipewright()).args(["resume", "out", "--set", "run.eval_batches=2"]);
    let output = resumed.output().expect("mpirun");
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    let found = figures(&path);
    assert_eq!(found, train_on_threads(&path, &[&SET[..], &["run.eval_batches=2"]].concat()));
}

/// Sends a signal to a rank, and checks that the run ends with one report. Returns its standard error.
fn check_lost(rank: u32, name: &str, limit: Duration, expected: &str) -> String {
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    let run = endless(&path, if name == "KILL" { 60 } else { 3 });
    let process = process_of(rank, &path);
    let start = Instant::now();
    signal(process, name);
    let output = run.wait_with_output().expect("mpirun ends");
    let (took, said) = (start.elapsed(), words(&output));
    assert!(said.contains(expected), "`{expected}` in: {said}");
    assert_eq!(said.matches("error:").count(), 1, "one report: {said}");
    assert!(took < limit, "{took:?}: {said}");
    assert_eq!(left_running(&path), 0, "nothing is left running");
    said
}

/// Stops one of three ranks. Checks that the report contains the last known place of that rank, and what each
/// of the others waits for.
fn check_stopped(stopped: u32) {
    // The time limit is the deadline, one second, and the time that mpirun needs to end a stopped process.
    let expected = format!("rank {stopped} has sent no heartbeat for 3.0 s");
    let said = check_lost(stopped, "STOP", Duration::from_secs(8), &expected);
    let lines = said.lines().filter_map(|line| line.strip_prefix("  | "));
    let report: Vec<&str> = lines.filter(|line| line.starts_with("  rank ")).collect();
    assert_eq!(report.len(), 3, "a line a rank: {said}");
    for (rank, line) in (0..).zip(report) {
        let (start, end) = if rank == stopped {
            (format!("  rank {rank} is silent; at its last heartbeat: "), " done (")
        } else {
            (format!("  rank {rank}: "), ", waits for ")
        };
        assert!(line.starts_with(&start) && line.contains(end), "`{start}...{end}` in: {said}");
    }
}

#[test]
fn a_rank_that_is_stopped_is_missed_at_the_deadline() {
    check_stopped(1);
    check_stopped(0);
}

#[test]
fn a_rank_that_is_killed_is_missed_at_once() {
    // The deadline is one minute, but the loss is noticed much earlier.
    check_lost(1, "KILL", Duration::from_secs(6), "rank 1 is lost");
    check_lost(0, "KILL", Duration::from_secs(6), "rank 0 is lost");
}
