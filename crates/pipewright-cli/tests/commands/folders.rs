//! Tests of runs whose folder is moved, removed or exchanged while they write to it.

use std::fs;
use std::path::Path;
use std::process::{Child, Output, Stdio};

use crate::run::Run;

/// A run that is too long to end by itself, and that saves each step.
const LONG: [&str; 4] =
    ["run.steps=1000000", "run.checkpoint_every=1", "run.keep_checkpoints=1", "run.timelines=4"];

/// Waits for the end of a run whose folder is lost, and checks what it says.
fn check_end(child: Child) -> String {
    let Output { status, stderr, .. } = child.wait_with_output().expect("the run is ours");
    let words = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(4), "{words}");
    assert!(words.contains("not saved"), "{words}");
    words
}

/// Starts a run, changes its folder with `change`, and waits for the end of the run.
fn check(change: impl Fn(&Run)) -> (Run, String) {
    let run = Run::new();
    let child = run.start_heard("train", &["small.toml"], &LONG, Stdio::piped());
    run.wait_for_step(3);
    change(&run);
    let words = check_end(child);
    (run, words)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
    names.collect()
}

#[test]
fn a_folder_that_is_moved_ends_the_run_and_is_not_created_again() {
    let (run, words) = check(|run| fs::rename(run.out(), run.path("aside")).expect("a move"));
    assert!(words.contains("the folder was moved or removed"), "{words}");
    assert!(!run.out().exists());
    assert!(names(&run.path("aside/checkpoints")).len() > 1, "the lock and a checkpoint");
}

#[test]
fn a_folder_that_is_removed_ends_the_run_and_is_not_created_again() {
    // The run may write into the folder while it is removed.
    let remove = |run: &Run| while fs::remove_dir_all(run.out()).is_err() {};
    let (run, _) = check(remove);
    assert!(!run.out().exists());
    let (run, words) = check(|run| while fs::remove_dir_all(run.path("out/checkpoints")).is_err() {});
    assert!(!run.path("out/checkpoints").exists());
    assert!(words.contains("out/checkpoints"), "{words}");
}

#[test]
fn another_run_in_the_same_place_is_left_alone() {
    let run = Run::new();
    let first = run.start_heard("train", &["small.toml"], &LONG, Stdio::piped());
    run.wait_for_step(3);
    fs::rename(run.out(), run.path("aside")).expect("a move");
    run.train(&["run.steps=6", "run.checkpoint_every=1", "run.keep_checkpoints=9", "run.seed=7"]);
    check_end(first);
    assert_eq!(run.figures().len(), 6);
    let expected: Vec<String> = (1..=6).map(|step| format!("step-{step:08}")).collect();
    assert_eq!(run.checkpoints(), expected);
    assert!(!names(&run.out()).iter().any(|name| name.starts_with(".saving")));
}

#[test]
#[cfg(unix)]
fn a_link_that_is_changed_ends_the_run() {
    use std::os::unix::fs::symlink;

    let run = Run::new();
    for real in ["one", "two"] {
        fs::create_dir(run.path(real)).expect("a folder");
    }
    symlink("one", run.out()).expect("a link");
    let child = run.start_heard("train", &["small.toml"], &LONG, Stdio::piped());
    run.wait_for_step(3);
    fs::create_dir(run.path("two/checkpoints")).expect("a folder");
    symlink("two", run.path("link")).and_then(|()| fs::rename(run.path("link"), run.out())).expect("a link");
    let words = check_end(child);
    assert!(words.contains("not the folder any more"), "{words}");
    assert_eq!(names(&run.path("two")), ["checkpoints"]);
    assert_eq!(names(&run.path("two/checkpoints")), [""; 0]);
}

#[test]
fn a_resumed_run_looks_at_its_folder_too() {
    let run = Run::new();
    run.train(&["run.steps=2"]);
    let child = run.start_heard("resume", &["out"], &LONG, Stdio::piped());
    run.wait_for_step(4);
    fs::rename(run.out(), run.path("aside")).expect("a move");
    let words = check_end(child);
    assert!(words.contains("the steps after "), "{words}");
    assert!(!run.out().exists());
}
