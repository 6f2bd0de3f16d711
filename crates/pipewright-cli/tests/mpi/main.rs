//! Tests of training in several processes: they compute the same figures as threads, only one process
//! reports, and all end when one is lost.

#![cfg(feature = "mpi")]

#[cfg(feature = "wgpu")]
mod devices;
mod exhaustion;
mod faults;
#[cfg(feature = "tokenizers")]
mod fine_tuning_page;
mod folders;
mod generation;
mod hosts;
mod launch;
#[path = "../scratch/mod.rs"]
mod scratch;
mod slurm;
mod slurm_cluster;
mod starts;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Returns a folder with a model that has enough layers for eight ranks with two stages each.
fn folder() -> TempDir {
    scratch::folder(&(scratch::small(16, 8, 2) + "deadline_seconds = 20\n"))
}

fn pipewright() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_pipewright"))
}

fn with_overrides(command: &mut Command, overrides: &[&str]) {
    command.args(["train", "small.toml"]);
    command.args(overrides.iter().flat_map(|argument| ["--set", argument]));
}

/// Returns `mpirun`, set up for a machine with fewer cores than processes, and for the user root.
fn mpirun(folder: &Path) -> Command {
    let mut command = Command::new("mpirun");
    command.current_dir(folder);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    // The `mpirun` of each test has its own folder for session files. Otherwise one test would delete the
    // files of another.
    command.env("OMPI_MCA_orte_tmpdir_base", folder);
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1").stdin(Stdio::null());
    // The number of seconds after which processes that have not ended fail their test.
    command.env("MPIEXEC_TIMEOUT", "150");
    command
}

fn processes_command(folder: &Path, count: u32, overrides: &[&str]) -> Command {
    let mut command = mpirun(folder);
    command.args(["-n", &count.to_string()]).arg(pipewright());
    with_overrides(&mut command, overrides);
    command.args(["--set", "pipeline.transport=mpi"]);
    command
}

fn processes(folder: &Path, count: u32, overrides: &[&str]) -> Output {
    processes_command(folder, count, overrides).output().expect("mpirun is installed with MPI")
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the exact parts of the loss and the gradient norm of each step.
fn figures(folder: &Path) -> Vec<[String; 5]> {
    figures_of(&folder.join("out"))
}

/// Returns the figures of the run in a folder.
fn figures_of(run: &Path) -> Vec<[String; 5]> {
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("a run writes its metrics");
    let figure = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).expect("a line is an object");
        let figures = ["loss", "auxiliary", "total", "grad_norm", "validation_loss"];
        // A line may be an event, such as a restart.
        value.get("event").is_none().then(|| figures.map(|key| value[key].to_string()))
    };
    metrics.lines().filter_map(figure).collect()
}

/// Returns the restarts in the metrics of a run. A line that is not complete yet does not count.
fn restarts(folder: &Path) -> Vec<serde_json::Value> {
    let metrics = fs::read_to_string(folder.join("out/metrics.jsonl")).unwrap_or_default();
    let lines = metrics.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    lines.filter(|line| line["event"] == "restart").collect()
}

/// Returns the names of the schedules that can train.
fn schedules() -> Vec<String> {
    let output = Command::new(pipewright()).args(["schedule", "--list"]).output().expect("it starts");
    let list = String::from_utf8(output.stdout).expect("text");
    let names = list.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned);
    names.filter(|name| name != "forwardonly").collect()
}

/// Trains with threads and with processes, and compares the figures. Returns the number of compared
/// schedules.
fn compare(ranks: u32) -> usize {
    let folder = folder();
    let mut compared = 0;
    for schedule in schedules() {
        let [ranks_key, schedule_key] =
            [format!("pipeline.ranks={ranks}"), format!("pipeline.schedule={schedule}")];
        let overrides = [ranks_key.as_str(), schedule_key.as_str()];
        let mut alone = Command::new(pipewright());
        with_overrides(alone.current_dir(folder.path()), &overrides);
        let output = alone.output().expect("it starts");
        if output.status.code() == Some(2) {
            // The schedule does not exist for this number of ranks.
            continue;
        }
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        let expected = figures(folder.path());
        let output = processes(folder.path(), ranks, &overrides);
        assert_eq!(output.status.code(), Some(0), "{schedule}, {ranks} ranks: {}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{schedule}, {ranks} ranks");
        compared += 1;
    }
    compared
}

#[test]
fn processes_train_as_threads_do_to_the_bit() {
    for ranks in [2, 4, 8] {
        let compared = compare(ranks);
        assert!(compared >= 12, "{ranks} ranks: {compared} schedules");
    }
}

#[test]
fn parts_of_a_head_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let parts = [
        "pipeline.ranks=4",
        "pipeline.head_parts=3",
        "pipeline.partition=explicit",
        "pipeline.boundaries=[9, 18, 19]",
    ];
    let mut alone = Command::new(pipewright());
    with_overrides(alone.current_dir(folder.path()), &parts);
    let output = alone.output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    let expected = figures(folder.path());
    let output = processes(folder.path(), 4, &parts);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert_eq!(figures(folder.path()), expected);
}

#[test]
fn experts_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let model = ["model.architecture=qwen3_moe", "model.num_experts=4", "model.output_router_logits=true"];
    for schedule in ["pipeline.schedule=zb-h1", "pipeline.schedule=zbvzerobubble"] {
        let overrides: Vec<&str> = model.into_iter().chain(["pipeline.ranks=4", schedule]).collect();
        let mut alone = Command::new(pipewright());
        with_overrides(alone.current_dir(folder.path()), &overrides);
        assert_eq!(alone.output().expect("it starts").status.code(), Some(0));
        let expected = figures(folder.path());
        assert!(
            expected.iter().all(|[_, auxiliary, ..]| auxiliary.starts_with("{\"moe_aux\":")),
            "{expected:?}"
        );
        let output = processes(folder.path(), 4, &overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{schedule}");
    }
}

#[test]
fn evaluations_in_processes_have_the_bits_of_threads() {
    let folder = folder();
    let common = [
        "data.validation_share=0.5",
        "data.bos_id=32",
        "data.packed=true",
        "run.eval_every=1",
        "run.accumulate=2",
        "run.steps=4",
        "run.patience=2",
    ];
    for (learning_rate, steps) in [("optimizer.learning_rate=1e-3", 4), ("optimizer.learning_rate=1e-30", 3)]
    {
        let cut =
            [learning_rate, "pipeline.ranks=2", "mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"];
        let overrides: Vec<&str> =
            common.into_iter().chain(cut).chain(["optimizer.weight_decay=0"]).collect();
        let mut alone = Command::new(pipewright());
        with_overrides(alone.current_dir(folder.path()), &overrides);
        assert_eq!(alone.output().expect("it starts").status.code(), Some(0));
        let expected = figures(folder.path());
        assert!(expected.iter().all(|figures| figures[4] != "null"), "{expected:?}");
        assert_eq!(expected.len(), steps, "a loss that does not fall ends the run");
        let output = processes(folder.path(), 4, &overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected);
        let best = fs::read_link(folder.path().join("out/checkpoints/best")).expect("a link");
        assert_eq!(best.display().to_string(), format!("step-{:08}", if steps == 3 { 1 } else { 4 }));
    }
}

#[test]
fn a_slow_process_is_named() {
    let folder = folder();
    let set = ["run.steps=16", "pipeline.ranks=2", "pipeline.microbatches=2", "model.num_hidden_layers=4"];
    let mut command = processes_command(folder.path(), 2, &set);
    let output =
        command.env("PIPEWRIGHT_FAULT", "slow:1:7:10").output().expect("mpirun is installed with MPI");
    let words = words(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert_eq!(words.matches(": rank 1 is slow: its actions take ").count(), 1, "{words}");
    let metrics = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("metrics");
    assert!(metrics.contains("{\"event\":\"slow_rank\""), "{metrics}");
}

/// Checks that a process that computes wrong bits once is named, and that the run has the figures of threads
/// without the fault.
fn check_verified(count: u32, rank: u32, set: &[&str]) {
    let folder = folder();
    let common = ["run.steps=10", "pipeline.microbatches=4", "model.num_hidden_layers=4", "pipeline.ranks=2"];
    let set = [&common[..], set].concat();
    let mut alone = Command::new(pipewright());
    with_overrides(alone.current_dir(folder.path()), &set);
    let output = alone.output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    let expected = figures(folder.path());
    let set = [&set[..], &["run.verify=on-suspicion"]].concat();
    let mut command = processes_command(folder.path(), count, &set);
    let fault = format!("flip:{rank}:9");
    let output = command.env("PIPEWRIGHT_FAULT", fault).output().expect("mpirun is installed with MPI");
    let words = words(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    assert_eq!(figures(folder.path()), expected, "{words}");
    let sentence = format!("computed 2 times more: rank {rank} has computed wrong bits in action 1");
    assert_eq!(words.matches(&sentence).count(), 1, "{set:?}: {words}");
    let metrics = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("metrics");
    assert!(metrics.contains("{\"event\":\"wrong_bits\",\"step\":9,"), "{metrics}");
}

#[test]
fn a_verified_step_names_the_process_with_wrong_bits() {
    check_verified(2, 1, &["mesh.data_parallel=1"]);
    check_verified(4, 1, &["mesh.data_parallel=2"]);
}

/// The wrong gradients reach the experts of the stage before, which the replicas hold together.
#[test]
fn a_verified_step_names_the_process_with_wrong_bits_among_replicas_that_hold_experts_together() {
    check_verified_experts(4, 1, &["mesh.data_parallel=2"]);
    // The tensor ranks of a stage have neighbouring numbers.
    let tensor = ["mesh.data_parallel=2", "mesh.tensor_parallel=2", "mesh.data_parallel_mode=sharded"];
    check_verified_experts(8, 6, &tensor);
}

#[test]
#[ignore = "takes a minute"]
fn a_verified_step_names_the_process_with_wrong_bits_in_other_meshes_with_experts() {
    check_verified_experts(4, 3, &["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"]);
    // Two expert groups hold the same rows of experts.
    check_verified_experts(8, 5, &["mesh.data_parallel=4", "mesh.data_parallel_mode=sharded"]);
    check_verified_experts(8, 3, &["mesh.data_parallel=2", "mesh.tensor_parallel=2"]);
}

/// Like [`check_verified`], for replicas of which two hold experts together.
fn check_verified_experts(count: u32, rank: u32, overrides: &[&str]) {
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "mesh.expert_parallel=2"];
    check_verified(count, rank, &[&experts[..], overrides].concat());
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
fn processes_skip_the_same_updates_as_threads() {
    let folder = folder();
    let set = ["pipeline.ranks=2", "mesh.data_parallel=2", "run.steps=8", "run.precision=f16"];
    let scale = ["run.loss_scale=4194304", "run.loss_scale_interval=2"];
    let overrides: Vec<&str> = set.into_iter().chain(scale).collect();
    let mut alone = Command::new(pipewright());
    with_overrides(alone.current_dir(folder.path()), &overrides);
    assert_eq!(alone.output().expect("it starts").status.code(), Some(0));
    let expected = figures(folder.path());
    let skipped = expected.iter().filter(|[_, _, _, norm, _]| norm == "null").count();
    assert!((1..8).contains(&skipped), "{expected:?}");
    let output = processes(folder.path(), 4, &overrides);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert_eq!(figures(folder.path()), expected);
}

#[test]
fn replicas_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    for (schedule, mode) in [
        ("1f1b", "replicated"),
        ("zbvzerobubble", "replicated"),
        ("1f1b", "sharded"),
        ("zbvzerobubble", "sharded"),
    ] {
        let (schedule, mode) =
            (format!("pipeline.schedule={schedule}"), format!("mesh.data_parallel_mode={mode}"));
        let overrides = ["mesh.data_parallel=2", "mesh.unshard_window=1", &schedule, &mode];
        let mut alone = Command::new(pipewright());
        with_overrides(alone.current_dir(folder.path()), &overrides);
        assert_eq!(alone.output().expect("it starts").status.code(), Some(0));
        let expected = figures(folder.path());
        let output = processes(folder.path(), 4, &overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{overrides:?}");
    }
}

/// A process that saves after another step than the others waits for their parts until its deadline.
#[test]
fn processes_save_after_the_same_steps_of_a_chosen_interval() {
    let folder = folder();
    let auto =
        ["run.checkpoint_every=auto", "run.failure_every=1s", "run.steps=12", "run.keep_checkpoints=12"];
    let mut alone = Command::new(pipewright());
    with_overrides(alone.current_dir(folder.path()), &["run.steps=12", "mesh.data_parallel=2"]);
    assert_eq!(alone.output().expect("it starts").status.code(), Some(0));
    let expected = figures(folder.path());
    let output = processes(folder.path(), 4, &[&["mesh.data_parallel=2"], &auto[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert!(words(&output).contains("checkpoints: every "), "{}", words(&output));
    assert!(folder.path().join("out/checkpoints/step-00000004/manifest.json").is_file());
    assert_eq!(figures(folder.path()), expected);
}

#[test]
fn groups_of_replicas_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let set = ["mesh.data_parallel=[2, 2]", "mesh.unshard_window=1", "run.steps=4", "run.checkpoint_every=2"];
    let cuts = [(8, "pipeline.schedule=1f1b"), (4, "pipeline.ranks=1")];
    for (count, cut) in cuts {
        let overrides = [&set[..], &[cut]].concat();
        let mut alone = Command::new(pipewright());
        with_overrides(alone.current_dir(folder.path()), &overrides);
        assert_eq!(alone.output().expect("it starts").status.code(), Some(0));
        let expected = figures(folder.path());
        let output = processes(folder.path(), count, &overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{overrides:?}");
        // The processes of the first group have saved their parts, and threads continue with them.
        let mut resumed = Command::new(pipewright());
        resumed.current_dir(folder.path()).args(["resume", "out/checkpoints/step-00000002"]);
        resumed.args(["--set", "pipeline.transport=local", "--set", "mesh.data_parallel=4"]);
        let output =
            resumed.args(["--set", "mesh.data_parallel_mode=replicated"]).output().expect("it starts");
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{overrides:?}, resumed");
    }
}

#[test]
fn tensor_ranks_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    for (ranks, overrides) in [
        (4, &["mesh.tensor_parallel=2"][..]),
        (8, &["mesh.data_parallel=2", "mesh.tensor_parallel=2", "pipeline.schedule=zbvzerobubble"]),
        (
            4,
            &[
                "mesh.tensor_parallel=2",
                "mesh.whole_experts=true",
                "model.architecture=qwen3_moe",
                "model.num_experts=5",
                "model.output_router_logits=true",
            ],
        ),
    ] {
        let mut alone = Command::new(pipewright());
        with_overrides(alone.current_dir(folder.path()), overrides);
        let output = alone.output().expect("it starts");
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        let expected = figures(folder.path());
        let output = processes(folder.path(), ranks, overrides);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{overrides:?}");
    }
}

#[test]
fn replicas_that_hold_experts_together_train_in_processes_as_in_threads_to_the_bit() {
    let folder = folder();
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "mesh.data_parallel=2"];
    for (count, set) in [
        (2, &["pipeline.ranks=1", "pipeline.schedule=1f1b"][..]),
        (4, &["pipeline.ranks=2", "pipeline.schedule=1f1b"]),
        // A forward computes while a backward exchanges tokens, and the other way round.
        (2, &["pipeline.ranks=1", "pipeline.schedule=dualpipev"]),
        // Two replicas hold the same rows of experts, and other rows of the other parameters.
        (4, &["pipeline.ranks=1", "mesh.data_parallel=4", "mesh.data_parallel_mode=sharded"]),
    ] {
        let whole = [&experts[..], set].concat();
        let mut alone = Command::new(pipewright());
        with_overrides(alone.current_dir(folder.path()), &whole);
        let output = alone.output().expect("it starts");
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        let expected = figures(folder.path());
        let output = processes(folder.path(), count, &[&whole[..], &["mesh.expert_parallel=2"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        assert_eq!(figures(folder.path()), expected, "{set:?}");
    }
}

/// Compares the greatest peak of each of two processes at the end of a run with that after a few steps.
fn check_drift(schedule: &str, steps: usize, overrides: &[&str]) {
    let folder = folder();
    let run = [format!("pipeline.schedule={schedule}"), format!("run.steps={steps}")];
    let overrides = [&run.each_ref().map(String::as_str)[..], overrides].concat();
    let mut command = processes_command(folder.path(), 2, &overrides);
    // A second for each step is enough on a busy machine too.
    let deadline = steps.max(600).to_string();
    let output = command.env("MPIEXEC_TIMEOUT", deadline).output().expect("mpirun is installed with MPI");
    assert_eq!(output.status.code(), Some(0), "{schedule}: {}", words(&output));
    let metrics =
        fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("a run writes its metrics");
    let peaks = |line: &str| -> Vec<u64> {
        let value: serde_json::Value = serde_json::from_str(line).expect("a line is an object");
        value["peak_bytes"].as_array().expect("a list").iter().filter_map(serde_json::Value::as_u64).collect()
    };
    let peaks: Vec<Vec<u64>> = metrics.lines().map(peaks).collect();
    let greatest = |steps: &[Vec<u64>], rank: usize| steps.iter().map(|peaks| peaks[rank]).max();
    for rank in 0..2 {
        let [early, late] =
            [&peaks[10..30], &peaks[steps - 20..]].map(|steps| greatest(steps, rank).expect("steps"));
        // Buffers for frames that wait for a rank are reused, so the peak stays about the same.
        assert!(early.abs_diff(late) <= 64 << 10, "{schedule}, rank {rank}: {early} bytes, then {late}");
    }
}

#[test]
fn what_a_process_holds_does_not_drift() {
    check_drift("1f1b", 200, &[]);
}

#[test]
#[ignore = "takes an hour"]
fn what_a_process_holds_after_ten_thousand_steps_is_what_it_holds_after_ten() {
    let schedules = schedules();
    let whole = schedules.iter().filter(|name| !["seq1f1b", "vocab1f1b"].contains(&name.as_str()));
    for schedule in whole {
        check_drift(schedule, 10_000, &["model.num_hidden_layers=2", "pipeline.microbatches=4"]);
    }
}

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
    check_refused(&run(2, &["data.path=none.txt"]), 2, &["error:", "none.txt"]);
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
    let overrides = ["pipeline.ranks=3", "pipeline.transport=mpi", "run.deadline_seconds=3"];
    with_overrides(&mut command, &overrides);
    command.args([":", "-n", "1"]).arg(pipewright()).args(["train", "pipe.toml"]);
    command.args(overrides.iter().flat_map(|argument| ["--set", argument]));
    let output = command.output().expect("mpirun is installed with MPI");
    check_refused(&output, 4, &["error:", "rank 2 has not described its run within 3.0 s"]);
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

/// Waits until the run trains. Returns the number of the process of a rank.
fn process_of(rank: u32, folder: &Path) -> u32 {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < Duration::from_secs(60), "rank {rank} does not start");
        let is_training = fs::metadata(folder.join("out/metrics.jsonl")).is_ok_and(|file| file.len() > 0);
        let numbers = fs::read_dir("/proc").expect("Linux").flatten();
        let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let mut found = numbers.filter(|number| {
            let environment = fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
            let is_rank = format!("OMPI_COMM_WORLD_RANK={rank}");
            let of_rank = environment.split(|byte| *byte == 0).any(|variable| variable == is_rank.as_bytes());
            of_rank && fs::read_link(format!("/proc/{number}/cwd")).is_ok_and(|cwd| cwd == folder)
        });
        if let Some(number) = found.next().filter(|_| is_training) {
            return number;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(number: u32, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &number.to_string()]).status();
    assert!(sent.expect("kill is everywhere").success());
}

/// Returns the number of processes that still run in the folder.
fn left_running(folder: &Path) -> usize {
    let numbers = fs::read_dir("/proc").expect("Linux").flatten();
    numbers.filter(|entry| fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd == folder)).count()
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

#[test]
fn processes_measure_their_link_and_share_one_plan() {
    let folder = folder();
    let overrides = ["pipeline.ranks=2", "pipeline.schedule=auto"];
    let output = processes(folder.path(), 2, &overrides);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    let said = words(&output);
    assert_eq!(said.matches("of the best possible; measured in ").count(), 1, "{said}");
    let profile = fs::read_dir(folder.path().join("out")).expect("the folder of the run").flatten();
    let profile = profile
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("profile-")));
    let text = fs::read_to_string(profile.expect("the profile is kept")).expect("text");
    let assumed: Vec<&str> = text.lines().filter(|line| line.contains("assumed")).collect();
    assert_eq!(assumed, ["assumed = [\"link.reduce_bytes_per_s\"]"], "a process measures one rank");
    assert!(text.contains("latency_s = ") && text.contains("\nranks = 2\n"), "{text}");
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
    assert!(start.elapsed() < Duration::from_secs(40), "the processes wait for each other");
}
