//! Tests of `launch`: it starts the processes, and a run survives the loss of processes and ends with the
//! bits of an undisturbed one.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::{
    figures, folder, left_running, pipewright, process_of, restarts, signal, train_on_threads,
    with_overrides, words,
};

/// The settings of runs that are disturbed: with a checkpoint after every second step. A process of a busy machine may be silent
/// for three seconds.
pub(super) const SETTINGS: [&str; 5] = [
    "run.steps=40",
    "run.checkpoint_every=2",
    "pipeline.ranks=2",
    "run.deadline_seconds=6",
    "model.num_hidden_layers=4",
];

/// Returns `launch` with its options, and `train` with the settings behind them.
pub(super) fn launch(folder: &Path, options: &[&str], set: &[&str]) -> Command {
    let mut command = Command::new(pipewright());
    command.current_dir(folder).env("OMPI_MCA_orte_tmpdir_base", folder).env("MPIEXEC_TIMEOUT", "150");
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    command.arg("launch").args(options).arg("--");
    with_overrides(&mut command, &[&SETTINGS[..], set].concat());
    command
}

/// Lets some steps from the sixth one on take a third of a second each, so that a fault from outside meets the run in one of them.
const SLOW: &str = "slow:0:6:18";

/// Returns the figures of a run that nothing disturbs, on threads.
fn undisturbed() -> Vec<[String; 5]> {
    let folder = folder();
    train_on_threads(folder.path(), &SETTINGS)
}

/// Waits until the run has taken this step.
pub(super) fn wait_for_step(folder: &Path, step: usize) {
    let start = Instant::now();
    let steps = || fs::read_to_string(folder.join("out/metrics.jsonl")).unwrap_or_default().lines().count();
    while steps() < step {
        assert!(start.elapsed() < Duration::from_secs(60), "step {} and not {step}", steps());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn end(child: Child) -> Output {
    child.wait_with_output().expect("it ends")
}

#[test]
fn a_launched_run_has_the_bits_of_threads() {
    let folder = folder();
    let output = launch(folder.path(), &["--ranks", "4"], &["pipeline.ranks=1"]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert_eq!(figures(folder.path()), undisturbed());
    assert!(words(&output).contains("4 ranks"), "{}", words(&output));
}

/// Sends a signal to each of these ranks of a launched run, one after the other, and checks that the run ends
/// as an undisturbed one.
fn check_survived(ranks: &[u32], name: &str) {
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    let child = launch(&path, &[], &[]).env("PIPEWRIGHT_FAULT", SLOW).spawn().expect("it starts");
    for (step, rank) in (5..).step_by(10).zip(ranks) {
        wait_for_step(&path, step);
        signal(process_of(*rank, &path), name);
    }
    let output = end(child);
    let said = words(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(said.matches("; the run continues from step ").count(), ranks.len(), "{said}");
    assert!(
        !said.contains("error:") && !said.contains("the schedule around the failure"),
        "one line: {said}"
    );
    assert_eq!(figures(&path), undisturbed(), "{said}");
    assert_eq!(left_running(&path), 0, "nothing is left running");
    assert!(!path.join("out/failure.json").exists() && !path.join("out/restart.json").exists());
}

#[test]
fn a_run_survives_processes_that_are_killed() {
    check_survived(&[1, 0], "KILL");
}

/// Lets rank 1 kill or stop itself in an update after step 5. Checks that the run continues after it with the
/// results of an undisturbed run, and that the record names the rank.
fn check_survived_in_update(kind: &str) {
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    let fault = format!("{kind}-in-update:1:file=fault,{SLOW}");
    let child = launch(&path, &[], &[]).env("PIPEWRIGHT_FAULT", fault).spawn().expect("it starts");
    wait_for_step(&path, 5);
    fs::write(path.join("fault"), "").expect("the scratch folder takes files");
    let output = end(child);
    let said = words(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(!path.join("fault").exists(), "the fault has happened");
    let [restart] = &restarts(&path)[..] else { panic!("one restart: {said}") };
    let cause = restart["cause"].as_str().expect("a text");
    assert!(cause.contains("rank 1 is lost") || cause.contains("rank 1 has sent no heartbeat"), "{cause}");
    assert_eq!(figures(&path), undisturbed(), "{said}");
}

#[test]
fn a_run_survives_a_process_that_is_killed_in_its_update() {
    check_survived_in_update("kill");
}

#[test]
#[ignore = "takes half a minute"]
fn a_run_survives_a_process_that_is_stopped_in_its_update() {
    check_survived_in_update("stop");
}

#[test]
fn a_killed_process_costs_at_most_one_step_with_copies_in_memory() {
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    fs::create_dir(path.join("memory")).expect("the scratch folder takes folders");
    let copies = ["run.checkpoint_every=0", "run.copy_every=1", "run.copy_folder=memory"];
    let child = launch(&path, &[], &copies).env("PIPEWRIGHT_FAULT", SLOW).spawn().expect("it starts");
    wait_for_step(&path, 5);
    signal(process_of(1, &path), "KILL");
    let said = words(&end(child));
    let [restart] = &restarts(&path)[..] else { panic!("{said}") };
    let lost =
        restart["failed_step"].as_u64().expect("a step") - 1 - restart["step"].as_u64().expect("a step");
    assert!(restart["state"] == "memory" && lost <= 1, "{restart}: {said}");
    assert_eq!(figures(&path), undisturbed(), "{said}");
    assert_eq!(fs::read_dir(path.join("memory")).expect("a folder").count(), 0, "no copies stay");
}

#[test]
#[ignore = "takes half a minute"]
fn a_run_survives_a_process_that_is_stopped() {
    check_survived(&[1], "STOP");
}

#[test]
fn a_failure_that_repeats_ends_the_launch_with_both_reports() {
    let folder = folder();
    let mut command = launch(folder.path(), &[], &[]);
    let output = command.env("PIPEWRIGHT_FAULT", "panic:1:5").output().expect("it starts");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert_eq!(said.matches("the schedule around the failure").count(), 2, "{said}");
    assert!(said.contains("the failure repeats at the same step with the same cause"), "{said}");
}

#[test]
fn a_fault_of_an_earlier_attempt_does_not_end_the_processes() {
    let folder = folder();
    train_on_threads(folder.path(), &SETTINGS);
    let left = folder.path().join("out/failure.json");
    fs::write(&left, "{}").expect("the folder takes files");
    let mut launch = Command::new(pipewright());
    launch.current_dir(folder.path()).env("OMPI_MCA_orte_tmpdir_base", folder.path());
    launch.args(["launch", "--", "resume", "out", "--set", "run.steps=42"]);
    let output = launch.stdin(Stdio::null()).output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert!(!left.exists(), "it would end processes that run longer than the grace");
}

#[test]
fn a_run_that_cannot_be_resumed_is_reported_with_its_fault() {
    let folder = folder();
    let mut command = launch(folder.path(), &[], &[]);
    let child = command.env("PIPEWRIGHT_FAULT", "hang:1:5").spawn().expect("it starts");
    wait_for_step(folder.path(), 4);
    fs::remove_file(folder.path().join("text.txt")).expect("the text");
    let output = end(child);
    let said = words(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    for part in ["text.txt", "the run failed:", "no rank has moved", "and it cannot be resumed:"] {
        assert!(said.contains(part), "`{part}` in: {said}");
    }
    assert!(!folder.path().join("out/restart.json").exists(), "a later resumption is not a restart");
}

#[test]
fn a_signal_to_the_launch_saves_a_checkpoint() {
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    let child = launch(&path, &[], &["run.steps=1000000"]).spawn().expect("it starts");
    wait_for_step(&path, 3);
    signal(child.id(), "TERM");
    let output = end(child);
    let said = words(&output);
    assert_eq!(output.status.code(), Some(5), "{said}");
    let saved = path.join(format!("out/checkpoints/step-{:08}/manifest.json", figures(&path).len()));
    assert!(saved.exists(), "{said}");
    assert_eq!(left_running(&path), 0, "nothing is left running");
}

/// Lets the process of rank 1 fail to write its part of a later checkpoint, of a run that saves one after
/// every 20 steps. Returns the path of the part.
pub(super) fn refuse_part(folder: &Path) -> String {
    let metrics = fs::read_to_string(folder.join("out/metrics.jsonl")).expect("metrics");
    let step = (metrics.lines().count() / 20 + 5) * 20;
    let part = format!("out/checkpoints/.saving-{step:08}/rank-0001.safetensors");
    fs::create_dir_all(folder.join(&part)).expect("the folder takes folders");
    part
}

#[test]
fn a_mistake_that_one_process_finds_while_it_trains_is_not_a_fault() {
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    let child =
        launch(&path, &[], &["run.steps=3000", "run.checkpoint_every=20"]).spawn().expect("it starts");
    wait_for_step(&path, 2);
    let part = refuse_part(&path);
    let output = end(child);
    let said = words(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(&part) && !said.contains("the run continues"), "{said}");
    let leader = "rank 1: the run cannot continue: ";
    assert_eq!(said.matches(leader).count(), 1, "{said}");
    assert_eq!(left_running(&path), 0, "nothing is left running");
}

#[test]
fn mistakes_are_found_before_processes_start() {
    let folder = folder();
    let refuse = |options: &[&str], set: &[&str], expected: &str| {
        let output = launch(folder.path(), options, set).output().expect("it starts");
        let said = words(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected), "`{expected}` in: {said}");
        assert!(!folder.path().join("out").exists(), "nothing has run");
    };
    refuse(&[], &["pipeline.trasport=x"], "unknown key");
    refuse(&["--ranks", "3"], &["mesh.data_parallel=2"], "need a multiple of 2 processes");
    refuse(&["--hosts", "none"], &[], "none: cannot be read");
    let hosts = folder.path().join("hosts");
    fs::write(&hosts, "nowhere.invalid slots=2\n").expect("a file");
    refuse(&["--hosts", "hosts"], &[], "the host nowhere.invalid does not answer");
    // The profile has more ranks, and the plan uses fewer.
    fs::write(&hosts, "nowhere.invalid slots=3\n").expect("a file");
    let planned = ["pipeline.ranks=2", "pipeline.profile_ranks=[0, 5]"];
    let sentence =
        "the hosts take 3 processes, and the plan uses rank 5 of its profile (pipeline.profile_ranks)";
    refuse(&["--hosts", "hosts"], &planned, sentence);
}
