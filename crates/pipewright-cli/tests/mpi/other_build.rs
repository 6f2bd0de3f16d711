//! Tests that a build for another processor predicts what this build predicts, and computes the same bits as a process of a run
//! with both builds. The variable [`COMMAND`] has the command that runs the other build, in words between spaces. Without it the
//! tests print a line and pass. `.ci/processors` sets it. Runs on threads are in `tests/commands/processors.rs`.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use super::{figures, mpirun, pipewright, scratch, with_overrides, words};

const COMMAND: &str = "PIPEWRIGHT_OTHER_BUILD";

/// A command that runs a build of the program, in words.
type Build = Vec<String>;

/// The figures of each step, and the files of the last checkpoint with their bytes.
type Results = (Vec<[String; 5]>, Vec<(String, Vec<u8>)>);

fn this_build() -> Build {
    vec![pipewright().display().to_string()]
}

fn other_build() -> Option<Build> {
    let Ok(command) = std::env::var(COMMAND) else {
        let _said = writeln!(std::io::stderr(), "SKIPPED: {COMMAND} names no build for another processor");
        return None;
    };
    Some(command.split_whitespace().map(str::to_owned).collect())
}

fn folder() -> TempDir {
    // Emulated processors are slow.
    scratch::folder(&(scratch::small(4, 2, 20) + "deadline_seconds = 120\n"))
}

/// Turns AMX off, whose products of bfloat16 have other bits. Programs that are built with all tests of the workspace have the
/// feature `testing`, which reads the variable.
fn without_tiles(command: &mut Command) -> &mut Command {
    command.env("PIPEWRIGHT_HIDE_INSTRUCTIONS", "AMX")
}

fn command(build: &Build, folder: &Path) -> Command {
    let (program, arguments) = build.split_first().expect("a command has a word");
    let mut command = Command::new(program);
    without_tiles(&mut command).args(arguments).current_dir(folder);
    command
}

/// Runs a command that succeeds. Returns the results of the run.
fn results(mut command: Command, folder: &Path) -> Results {
    let output = command.output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{command:?}: {}", words(&output));
    let mut files = Vec::new();
    for entry in
        fs::read_dir(folder.join("out/checkpoints/step-00000020")).expect("a checkpoint of the last step")
    {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files.push((name, fs::read(&path).expect("a file")));
    }
    files.sort();
    (figures(folder), files)
}

/// Trains with this build on threads.
fn train(overrides: &[&str]) -> Results {
    let folder = folder();
    let mut command = command(&this_build(), folder.path());
    with_overrides(&mut command, overrides);
    results(command, folder.path())
}

#[track_caller]
fn assert_equal(found: &Results, expected: &Results, what: &[&str]) {
    assert_eq!(found.0.len(), 20, "{what:?}: each step once");
    assert_eq!(found.0, expected.0, "{what:?}: losses and norms");
    let names = |results: &Results| results.1.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what:?}");
    for ((name, bytes), (_, expected)) in found.1.iter().zip(&expected.1) {
        // Not `assert_eq`, which would print all bytes.
        assert!(bytes == expected, "{what:?}: {name} has other bytes");
    }
}

#[test]
fn predictions_are_equal() {
    let Some(other) = other_build() else { return };
    let folder = folder();
    let compared =
        ["compare", "1f1b", "zbvzerobubble", "dualpipev", "--ranks=4", "--microbatches=8", "--format=json"];
    for arguments in [&compared[..], &["check", "small.toml", "--set=pipeline.ranks=2"]] {
        let [found, expected] = [&other, &this_build()].map(|build| {
            let output = command(build, folder.path()).args(arguments).output().expect("it starts");
            assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", words(&output));
            String::from_utf8(output.stdout).expect("text")
        });
        assert_eq!(found, expected, "{arguments:?}");
    }
}

/// Trains two ranks as two processes of one run, each of another build. Compares the results with threads of this build.
fn check_together(first: &Build, second: &Build, overrides: &[&str]) {
    let overrides = [&["pipeline.ranks=2"], overrides].concat();
    let folder = folder();
    let mut command = mpirun(folder.path());
    without_tiles(&mut command).env("MPIEXEC_TIMEOUT", "600");
    // Emulators do not have the system call with which Open MPI reads the memory of another process.
    command.env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
    for (build, end) in [(first, Some(":")), (second, None)] {
        command.args(["-n", "1"]).args(build);
        with_overrides(&mut command, &overrides);
        command.args(["--set", "pipeline.transport=mpi"]).args(end);
    }
    assert_equal(&results(command, folder.path()), &train(&overrides), &overrides);
}

#[test]
fn a_second_process_of_the_other_build_trains_to_the_bit() {
    let Some(other) = other_build() else { return };
    check_together(&this_build(), &other, &["pipeline.schedule=zbvzerobubble"]);
}

#[test]
fn a_first_process_of_the_other_build_trains_in_bfloat16_to_the_bit() {
    let Some(other) = other_build() else { return };
    check_together(&other, &this_build(), &["run.precision=bf16"]);
}
