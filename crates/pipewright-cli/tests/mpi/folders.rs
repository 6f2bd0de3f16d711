//! Tests of the folder of a run that several processes write to: all must see it, and it may not move.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::{folder, mpirun, pipewright, processes_command, words};

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_folder_that_a_process_does_not_see_is_refused_before_the_training() {
    let folder = folder();
    let mut command = mpirun(folder.path());
    for (number, out) in ["run.out=results/one", "run.out=results/two"].into_iter().enumerate() {
        if number > 0 {
            command.arg(":");
        }
        command.args(["-n", "1"]).arg(pipewright()).args(["train", "small.toml", "--set", out]);
        let set = ["pipeline.transport=mpi", "pipeline.ranks=2", "run.deadline_seconds=6"];
        command.args(set.iter().flat_map(|set| ["--set", set]));
    }
    let output = command.output().expect("mpirun is installed with MPI");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("rank 1: ") && said.contains("results/two: the process on "), "{said}");
    assert!(!said.contains("step 1/"), "{said}");
    assert!(!folder.path().join("results").exists(), "nothing is left");
}

#[test]
fn a_folder_that_moves_ends_all_processes_and_is_not_created_again() {
    let folder = folder();
    let set =
        ["pipeline.ranks=2", "run.steps=1000000", "run.checkpoint_every=1", "optimizer.schedule=constant"];
    let child = processes_command(folder.path(), 2, &set).stderr(Stdio::piped()).spawn();
    let child = child.expect("mpirun is installed with MPI");
    let (out, start) = (folder.path().join("out"), Instant::now());
    let steps = || fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default().lines().count();
    while steps() < 3 {
        assert!(start.elapsed() < Duration::from_secs(60), "the run has taken {} steps", steps());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!names(&out).iter().any(|name| name.starts_with(".pipewright")), "the token is removed");
    fs::rename(&out, folder.path().join("aside")).expect("a move");
    let output = child.wait_with_output().expect("it ends");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("the folder was moved or removed"), "{said}");
    assert!(!out.exists(), "{said}");
}
