//! Tests of the schedule commands through the binary: agreement with the reference, and edge cases for
//! scripts.

mod advice;
mod cluster_plans;
mod cluster_checks;
mod cluster_goodput;
mod cluster_mixed;
mod cluster_refusals;
mod clusters;
mod comparisons;
mod delayed;
mod edges;
mod emitted;
mod golden;
mod plans;
mod unlike_plans;
mod predictions;
mod transports;

use std::fs;
use std::process::Output;
use std::time::{Duration, Instant};

use assert_cmd::Command;
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().expect("a scratch folder")
}

fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) {
    fs::write(folder.path().join(name), content).expect("the scratch folder takes files");
}

/// Splits a command at its blanks.
fn split(command: &str) -> Vec<&str> {
    command.split_whitespace().collect()
}

fn run(folder: &TempDir, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("pipewright").expect("the binary is built");
    command.current_dir(folder.path()).args(arguments).timeout(Duration::from_secs(60));
    command.output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the cases of a table. A case is a line, and the indented lines below it, joined with blanks.
fn cases(table: &str) -> Vec<(&str, String)> {
    let mut cases: Vec<(&str, String)> = Vec::new();
    for line in table.lines().filter(|line| !line.trim().is_empty()) {
        match (line.strip_prefix("    "), cases.last_mut()) {
            (Some(more), Some((_, below))) if below.is_empty() => below.push_str(more),
            (Some(more), Some((_, below))) => *below += &format!(" {more}"),
            _ => cases.push((line, String::new())),
        }
    }
    cases
}

/// Runs a command that succeeds, and whose standard error names written files at most. Returns its standard
/// output.
fn succeed(folder: &TempDir, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
    assert!(stderr.lines().all(|line| line.starts_with("wrote ")), "{arguments:?}: {stderr}");
    text(&output.stdout)
}

/// Checks that a command is refused with `code`, and that standard error starts with `words`. Also checks
/// that wrong input leaves standard output empty and that the refusal is fast.
fn refuse(folder: &TempDir, arguments: &[&str], code: i32, words: &str) {
    let start = Instant::now();
    let output = run(folder, arguments);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(stderr.starts_with(words), "{arguments:?}: {stderr}");
    assert!(code != 2 || output.stdout.is_empty(), "{arguments:?}: data next to an error");
    assert!(start.elapsed() < Duration::from_secs(10), "{arguments:?}: {:?}", start.elapsed());
}
