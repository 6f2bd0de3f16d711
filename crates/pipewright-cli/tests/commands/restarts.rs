//! Tests of runs that continue by themselves after a fault: the results have the bits of an undisturbed run,
//! and a fault that repeats ends the run.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::run::{Run, finished, signal, tensors};

/// The settings of all runs: two ranks as threads, and a checkpoint after every second step.
const SETTINGS: [&str; 3] = ["run.steps=8", "run.checkpoint_every=2", "pipeline.ranks=2"];

/// The setting of runs with a rank that hangs. A disk may need seconds for a checkpoint.
const BRIEF: &str = "run.deadline_seconds=5";

/// Returns the command that trains.
fn command(run: &Run, set: &[&str]) -> Command {
    let mut command = run.binary();
    command.args(["train", "small.toml"]);
    command.args(SETTINGS.iter().chain(set).flat_map(|set| ["--set", *set]));
    command
}

/// Trains with injected faults, and checks the exit code. Returns what the run has said.
fn train(run: &Run, faults: &str, set: &[&str], expected: i32) -> String {
    let (code, _, words) = finished(command(run, set).env("PIPEWRIGHT_FAULT", faults));
    assert_eq!(code, Some(expected), "{faults}: {words}");
    words
}

/// Returns the steps that began during the one before, in the order of the metrics.
fn early_steps(run: &Run) -> Vec<u64> {
    let steps = run.steps();
    let early = steps.iter().filter(|line| line["began_early"] == true);
    early.map(|line| line["step"].as_u64().expect("a step")).collect()
}

/// Returns the restarts in the metrics: the step that failed, and the last step before it that counts.
fn restarts(run: &Run) -> Vec<(u64, u64)> {
    let events = run.events().into_iter().filter(|line| line["event"] == "restart");
    let step = |event: &Value, key: &str| event[key].as_u64().expect("a step");
    events.map(|event| (step(&event, "failed_step"), step(&event, "step"))).collect()
}

/// Trains with faults, and compares the results with the results of an undisturbed run.
fn check(faults: &str, set: &[&str], expected: &[(u64, u64)]) -> String {
    check_run(faults, set, expected).1
}

/// Like [`check`], and returns the run too.
fn check_run(faults: &str, set: &[&str], expected: &[(u64, u64)]) -> (Run, String) {
    let (undisturbed, run) = (Run::new(), Run::new());
    undisturbed.train(&[&SETTINGS[..], set].concat());
    let words = train(&run, faults, &[set, &["run.restarts=4"]].concat(), 0);
    assert_eq!(restarts(&run), expected, "{words}");
    assert_eq!(run.figures(), undisturbed.figures());
    let last = "out/checkpoints/step-00000008";
    assert!(
        tensors(&run.path(last)) == tensors(&undisturbed.path(last)),
        "the parameters and the optimizer's state"
    );
    assert!(!run.path("out/restart.json").exists());
    (run, words)
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

/// All steps after the first one begin during the one before, except the ones that follow a checkpoint or an
/// evaluation.
#[test]
fn steps_begin_during_the_one_before() {
    let check = |set: &[&str], expected: &[u64]| {
        let run = Run::new();
        run.train(&[&SETTINGS[..], set].concat());
        assert_eq!(early_steps(&run), expected, "{set:?}");
    };
    check(&[], &[2, 4, 6, 8]);
    check(&["run.checkpoint_every=4"], &[2, 3, 4, 6, 7, 8]);
    check(&["run.checkpoint_every=4", "run.accumulate=2"], &[2, 3, 4, 6, 7, 8]);
    check(&["run.checkpoint_every=0", "run.verify=\"on-suspicion\""], &[2, 3, 4, 5, 6, 7, 8]);
}

/// The step after each of 5, 6 and 7 begins during that step, so it has begun when that one fails.
#[test]
fn a_step_that_fails_drops_the_one_that_has_begun_behind_it() {
    let every = ["run.checkpoint_every=4"];
    let (run, _) = check_run("panic:1:6", &every, &[(6, 4)]);
    let early = early_steps(&run);
    assert!([2, 3, 4, 6, 7, 8].iter().all(|step| early.contains(step)), "{early:?}");
    check("panic:0:5,panic:1:7", &every, &[(5, 4), (7, 4)]);
    check("hang:0:6", &[&every[..], &[BRIEF]].concat(), &[(6, 4)]);
}

/// In step 6, rank 1 has updated before rank 0 finds a gradient that is not finite.
#[test]
fn a_step_that_fails_undoes_its_early_updates() {
    let early = ["optimizer.post_validation=true", "optimizer.clip_norm=0"];
    let words = check("infinite:1:6", &early, &[(6, 4)]);
    assert!(words.contains("gradient") && words.contains("continues from step 4"), "{words}");
    check("panic:0:6,panic:1:7", &early, &[(6, 4), (7, 6)]);
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
    check("hang:0:5", &[BRIEF], &[(5, 4)]);
}

#[test]
fn a_fault_that_repeats_ends_the_run_with_both_reports() {
    let run = Run::new();
    let words = train(&run, "panic:1:5:9", &["run.restarts=4"], 4);
    assert_eq!(words.matches("the schedule around the failure").count(), 2, "{words}");
    assert!(words.contains("the failure repeats at the same step with the same cause"), "{words}");
    assert_eq!(restarts(&run), [(5, 4)]);
}

#[test]
fn a_run_ends_when_its_restarts_are_used() {
    let run = Run::new();
    let words = train(&run, "panic:1:3,panic:1:5", &["run.restarts=1"], 4);
    assert!(
        words.contains("the run has used its 1 restart, so it ends") && words.contains("error: step 5"),
        "{words}"
    );
}

#[test]
fn a_run_without_restarts_ends_at_its_first_fault() {
    let run = Run::new();
    let words = train(&run, "panic:1:3", &[], 4);
    assert!(!words.contains("continues"), "{words}");
    assert!(!run.path("out/failure.json").exists(), "only `launch` reads it");
}

#[test]
fn a_fault_that_cannot_happen_is_refused() {
    let run = Run::new();
    for faults in ["panic:x", "panic:1:0", "panic:1:3:0", "panic:2:3"] {
        train(&run, faults, &[], 2);
    }
    assert!(!run.out().exists(), "nothing has run");
}

#[test]
fn a_run_that_cannot_be_resumed_reports_both_failures() {
    let run = Run::new();
    let mut command = command(&run, &["run.restarts=1", BRIEF]);
    let child = command
        .env("PIPEWRIGHT_FAULT", "hang:0:5")
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    run.wait_for_step(4);
    fs::remove_file(run.path("text.txt")).expect("the text");
    let output = child.wait_with_output().expect("it ends");
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{words}");
    let parts = ["the run failed:", "no rank has moved", "and it cannot be resumed:", "text.txt"];
    let places: Vec<Option<usize>> = parts.iter().map(|part| words.find(part)).collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?}: {words}");
}

#[test]
fn a_record_that_a_launch_has_left_does_not_make_a_resumption_a_restart() {
    let run = Run::new();
    run.train(&SETTINGS);
    let record = r#"{"event":"restart","step":0,"failed_step":6,"rank":1,"cause":"lost","restart":1,"of":4}"#;
    run.write("out/restart.json", record);
    let (_, words) = run.succeed(&["resume", "out"], &["run.steps=10"]);
    assert!(words.contains("resuming from step 8") && !words.contains("lost"), "{words}");
    assert_eq!(restarts(&run), [], "{words}");
}

/// A file system of 12 MB for the folder of a run, with 2 MB left: less than one checkpoint with [`LARGE`].
struct FullDisk(PathBuf);

/// The settings of a run with checkpoints of more than 3 MB.
const LARGE: [&str; 3] = ["model.vocab_size=8192", "run.keep_checkpoints=1", "run.restarts=2"];

impl FullDisk {
    /// Mounts the file system. Returns `None` if that is not allowed.
    fn mount(run: &Run) -> Option<Self> {
        fs::create_dir(run.out()).expect("a new folder");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=12m", "tmpfs"]).arg(run.out());
        let is_mounted = mount.output().is_ok_and(|output| output.status.success());
        if !is_mounted {
            #[expect(clippy::print_stderr, reason = "a test that cannot run says so")]
            {
                eprintln!("skipped: file systems cannot be mounted here (that needs root)");
            }
            return None;
        }
        let disk = Self(run.out());
        fs::write(disk.filling(), vec![0; 10 << 20]).expect("10 of 12 MB");
        Some(disk)
    }

    fn filling(&self) -> PathBuf {
        self.0.join("filling")
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).output();
    }
}

/// Trains until the run waits for space.
fn wait_for_full_disk(run: &Run, deadline: &str) -> Child {
    let said = fs::File::create(run.path("said")).expect("the scratch folder takes files");
    let mut command = command(run, &[&LARGE[..], &[deadline]].concat());
    let mut child = command.stderr(said).spawn().expect("the binary starts");
    while !said_of(run).contains("the run waits for space on the disk") {
        assert!(child.try_wait().expect("the process is ours").is_none(), "{}", said_of(run));
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

fn said_of(run: &Run) -> String {
    run.read("said")
}

#[test]
fn a_run_waits_until_the_disk_has_the_space_of_a_checkpoint() {
    let run = Run::new();
    let Some(disk) = FullDisk::mount(&run) else { return };
    let mut child = wait_for_full_disk(&run, "run.deadline_seconds=600");
    // A run that does not wait fails a second time within this time.
    std::thread::sleep(Duration::from_secs(1));
    assert!(child.try_wait().expect("the process is ours").is_none(), "{}", said_of(&run));
    fs::remove_file(disk.filling()).expect("the file");
    assert_eq!(child.wait().expect("it ends").code(), Some(0), "{}", said_of(&run));
    assert_eq!(restarts(&run), [(2, 0)], "{}", said_of(&run));
    assert_eq!(run.figures().len(), 8);
}

#[test]
fn a_run_that_waits_for_space_ends_at_a_signal() {
    let run = Run::new();
    let Some(_disk) = FullDisk::mount(&run) else { return };
    let mut child = wait_for_full_disk(&run, "run.deadline_seconds=600");
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().expect("it ends").code(), Some(2), "{}", said_of(&run));
    let said = said_of(&run);
    assert!(said.contains("free some space, then start again") && !said.contains("continues"), "{said}");
}

#[test]
fn a_run_waits_for_space_only_until_the_deadline() {
    let run = Run::new();
    let Some(_disk) = FullDisk::mount(&run) else { return };
    let mut child = wait_for_full_disk(&run, "run.deadline_seconds=1");
    assert_eq!(child.wait().expect("it ends").code(), Some(2), "{}", said_of(&run));
    let said = said_of(&run);
    assert!(said.contains("the disk did not have the") && !said.contains("continues"), "{said}");
}

#[test]
fn the_report_has_the_restarts() {
    let run = Run::new();
    train(&run, "panic:1:6", &["run.restarts=1"], 0);
    run.print(&["report", "out", "-o", "page.html"]);
    let page = run.read("page.html");
    assert!(
        page.contains("\"step\":6,\"text\"") && page.contains("the run continues from step 4"),
        "the data of the page"
    );
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_build_without_mpi_says_how_to_build_with_it() {
    let run = Run::new();
    let launch = ["launch", "--ranks", "2", "--", "train", "small.toml"];
    run.refuse(&launch, &[], "cargo build --release --features mpi");
}
