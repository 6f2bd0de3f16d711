//! The commands about schedules, through the binary: agreement with the reference, and the edges that scripts meet.

mod edges;
mod golden;
mod predictions;

use std::fs;
use std::process::Output;
use std::time::{Duration, Instant};

use assert_cmd::Command;
use tempfile::TempDir;

/// A scratch folder.
fn folder() -> TempDir {
    tempfile::tempdir().expect("a scratch folder")
}

fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) {
    fs::write(folder.path().join(name), content).expect("the scratch folder takes files");
}

fn run(folder: &TempDir, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("pipewright").expect("the binary is built");
    command.current_dir(folder.path()).args(arguments).timeout(Duration::from_secs(60));
    command.output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that succeeds and has nothing to say but its data; returns its standard output.
fn succeed(folder: &TempDir, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{arguments:?}");
    text(&output.stdout)
}

/// Runs a command that is refused with `code` and, at the start of standard error, these words. No data comes with
/// wrong input, and no refusal takes long.
fn refuse(folder: &TempDir, arguments: &[&str], code: i32, words: &str) {
    let start = Instant::now();
    let output = run(folder, arguments);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(stderr.starts_with(words), "{arguments:?}: {stderr}");
    assert!(code != 2 || output.stdout.is_empty(), "{arguments:?}: data beside an error");
    assert!(start.elapsed() < Duration::from_secs(10), "{arguments:?}: {:?}", start.elapsed());
}
