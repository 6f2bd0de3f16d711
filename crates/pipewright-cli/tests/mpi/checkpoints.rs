//! Tests of checkpoints of several processes: all save after the same steps, and a run resumes with other
//! numbers of processes.

use std::path::Path;
use std::process::Command;

use super::{figures, folder, mpirun, pipewright, processes, train_on_threads, words};

/// A process that saves after another step than the others waits for their parts until its deadline.
#[test]
fn processes_save_after_the_same_steps_of_a_chosen_interval() {
    let folder = folder();
    let auto =
        ["run.checkpoint_every=auto", "run.failure_every=1s", "run.steps=12", "run.keep_checkpoints=12"];
    let expected = train_on_threads(folder.path(), &["run.steps=12", "mesh.data_parallel=2"]);
    let output = processes(folder.path(), 4, &[&["mesh.data_parallel=2"], &auto[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert!(words(&output).contains("checkpoints: every "), "{}", words(&output));
    assert!(folder.path().join("out/checkpoints/step-00000004/manifest.json").is_file());
    assert_eq!(figures(folder.path()), expected);
}

/// Checks that a run of six steps that is resumed twice has the same figures as the uninterrupted run
/// `whole`. The run starts in the processes of `first`, is saved after two steps, resumes in one process with
/// threads, and resumes after four steps in two processes with `then`.
fn check_resume(whole: (u32, &[&str]), first: (u32, &[&str]), then: &str) {
    let run = |folder: &Path, (count, set): (u32, &[&str]), more: &[&str]| {
        let output = processes(folder, count, &[set, more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    };
    let resume = |mut command: Command, set: &[&str]| {
        command.args(["resume", "out"]).args(set.iter().flat_map(|argument| ["--set", argument]));
        let output = command.output().expect("it starts");
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        words(&output)
    };
    let (undisturbed, folder) = (folder(), folder());
    run(undisturbed.path(), whole, &["run.steps=6"]);

    run(folder.path(), first, &["run.steps=2", "run.checkpoint_every=2"]);
    let mut alone = Command::new(pipewright());
    alone.current_dir(folder.path());
    resume(alone, &["pipeline.transport=local", "run.steps=4"]);
    let mut again = mpirun(folder.path());
    again.args(["-n", "2"]).arg(pipewright());
    let said = resume(again, &["pipeline.transport=mpi", then, "run.steps=6"]);
    assert_eq!(said.matches("resuming from step 4").count(), 1, "{said}");
    assert_eq!(figures(folder.path()), figures(undisturbed.path()));
}

#[test]
fn processes_save_what_threads_go_on_with_and_the_other_way_round() {
    check_resume((2, &["pipeline.ranks=2"]), (4, &["pipeline.ranks=4"]), "pipeline.ranks=2");
}

#[test]
fn sharded_processes_save_their_parts_and_any_others_go_on() {
    let whole = ["pipeline.ranks=2", "mesh.data_parallel=2"];
    let sharded = [&whole[..], &["mesh.data_parallel_mode=sharded"]].concat();
    check_resume((4, &whole), (4, &sharded), "pipeline.ranks=1");
}
