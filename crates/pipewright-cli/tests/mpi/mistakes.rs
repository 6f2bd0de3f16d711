//! Tests of mistakes that processes find at the start: one process reports them, and none waits for another.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use super::{folder, left_running, mpirun, pipewright, processes, with_overrides, words};

/// Checks the exit code of a run that fails at the start, and that standard error contains each part once.
fn check_refused(output: &Output, code: i32, expected: &[&str]) {
    let said = words(output);
    assert_eq!(output.status.code(), Some(code), "{said}");
    for part in expected {
        assert_eq!(said.matches(part).count(), 1, "`{part}` once in: {said}");
    }
}

#[test]
fn mistakes_are_told_once() {
    let folder = folder();
    let run = |count, overrides: &[&str]| processes(folder.path(), count, overrides);
    check_refused(&run(2, &["pipeline.trasport=x"]), 2, &["error:", "unknown key `trasport`"]);
    check_refused(&run(3, &[]), 2, &["error:", "3 processes were started for 2 ranks"]);
    let place =
        "`mpirun -n 2 pipewright ...` on the hosts of ranks 0, 2 of the profile (pipeline.profile_ranks)";
    check_refused(
        &run(3, &["pipeline.profile_ranks=[0, 2]"]),
        2,
        &["3 processes were started for 2 ranks", place],
    );
    check_refused(&run(2, &["data.path=none.txt"]), 2, &["error:", "none.txt"]);
}

#[test]
fn processes_that_would_share_a_device_are_refused() {
    let folder = folder();
    let output = processes(folder.path(), 2, &["run.exclusive=true"]);
    let words = words(&output);
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("ranks 0, 1 have the same device, `flex` of "), "{words}");
    assert_eq!(words.matches("error: ").count(), 1, "one process reports: {words}");
    assert!(!folder.path().join("out").exists(), "nothing has run");
}

#[test]
fn processes_that_would_run_different_things_are_named() {
    let folder = folder();
    let mut command = mpirun(folder.path());
    command.args(["-n", "1"]).arg(pipewright());
    with_overrides(&mut command, &["pipeline.transport=mpi"]);
    command.args([":", "-n", "1"]).arg(pipewright());
    with_overrides(&mut command, &["pipeline.transport=mpi", "run.seed=7"]);
    let output = command.output().expect("mpirun is installed with MPI");
    check_refused(&output, 2, &["error:", "rank 1: `run.seed` is 7, but 42 on rank 0"]);
}

#[test]
fn a_process_that_does_not_get_to_the_start_is_named() {
    let folder = folder();
    // The process's configuration is a pipe without a writer: the process sends heartbeats, and its read
    // never ends.
    let pipe = Command::new("mkfifo").arg(folder.path().join("pipe.toml")).status();
    assert!(pipe.expect("mkfifo is everywhere").success());
    let mut command = mpirun(folder.path());
    command.args(["-n", "2"]).arg(pipewright());
    let overrides = ["pipeline.ranks=3", "pipeline.transport=mpi", "run.deadline_seconds=6"];
    with_overrides(&mut command, &overrides);
    command.args([":", "-n", "1"]).arg(pipewright()).args(["train", "pipe.toml"]);
    command.args(overrides.iter().flat_map(|argument| ["--set", argument]));
    let output = command.output().expect("mpirun is installed with MPI");
    check_refused(&output, 4, &["error:", "rank 2 has not described its run within 6.0 s"]);
    assert_eq!(left_running(&folder.path().canonicalize().expect("it exists")), 0, "nothing is left running");
}

#[test]
fn several_processes_do_not_each_run_all_ranks() {
    let folder = folder();
    let mut command = mpirun(folder.path());
    command.args(["-n", "2"]).arg(pipewright());
    with_overrides(&mut command, &[]);
    let output = command.output().expect("mpirun is installed with MPI");
    check_refused(&output, 2, &["error:", "set pipeline.transport=mpi"]);
}

#[test]
fn a_mistake_in_one_process_is_told_before_it_measures() {
    let folder = folder();
    let run = |arguments: &[&str], mistake: &str| {
        let mut command = mpirun(folder.path());
        for (separator, more) in [(None, None), (Some(":"), Some(mistake))] {
            command.args(separator).args(["-n", "1"]).arg(pipewright()).args(arguments);
            command.args(["--set", "pipeline.transport=mpi", "--set", "pipeline.ranks=2"]);
            command.args(more.iter().flat_map(|set| ["--set", *set]));
        }
        command.output().expect("mpirun is installed with MPI")
    };
    let auto = ["train", "small.toml", "--set", "pipeline.schedule=auto"];
    let missing = "data.path=none.txt";
    check_refused(&run(&auto, missing), 2, &["error:", "none.txt"]);
    let profile = ["profile", "small.toml", "--time-limit", "1s"];
    check_refused(&run(&profile, missing), 2, &["error:", "none.txt"]);
    // A mistake that this process finds before it compares anything.
    let start = Instant::now();
    check_refused(&run(&auto, "model.nope=1"), 2, &["error:", "unknown key"]);
    let took = start.elapsed();
    assert!(took < Duration::from_secs(40), "the processes wait for each other: {took:?}");
}
