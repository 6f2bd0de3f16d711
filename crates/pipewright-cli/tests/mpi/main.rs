//! Tests of training in several processes: they compute the same figures as threads, only one process
//! reports, and all end when one is lost.

#![cfg(feature = "mpi")]

mod apart;
mod bits;
mod checkpoints;
#[cfg(feature = "wgpu")]
mod devices;
mod exhaustion;
mod faults;
#[cfg(feature = "tokenizers")]
mod fine_tuning_page;
mod folders;
mod generation;
mod held_memory;
mod hosts;
mod launch;
mod layer_moves;
mod lost_processes;
mod measurement;
mod mistakes;
mod other_build;
mod outside;
#[path = "../scratch/mod.rs"]
mod scratch;
mod slurm;
mod slurm_cluster;
mod starts;
#[path = "../turns/mod.rs"]
mod turns;
mod verified_steps;

use std::fs;
use std::ops::Deref;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use self::turns::SharedTurn;

/// Returns a folder with a model that has enough layers for eight ranks with two stages each.
fn folder() -> Folder {
    let turn = SharedTurn::begin();
    Folder { folder: scratch::folder(&(scratch::small(16, 8, 2) + "deadline_seconds = 20\n")), _turn: turn }
}

/// A scratch folder. Its test has a turn as long as it exists.
struct Folder {
    folder: TempDir,
    _turn: SharedTurn,
}

impl Deref for Folder {
    type Target = TempDir;

    fn deref(&self) -> &TempDir {
        &self.folder
    }
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

/// Trains on threads of one process. Returns the figures.
fn train_on_threads(folder: &Path, overrides: &[&str]) -> Vec<[String; 5]> {
    let mut command = Command::new(pipewright());
    with_overrides(command.current_dir(folder), overrides);
    let output = command.output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{overrides:?}: {}", words(&output));
    figures(folder)
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

/// Waits until the run trains. Returns the number of the process of a rank.
fn process_of(rank: u32, folder: &Path) -> u32 {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < Duration::from_secs(60), "rank {rank} does not start");
        let is_training = fs::metadata(folder.join("out/metrics.jsonl")).is_ok_and(|file| file.len() > 0);
        if let Some(number) = find_process(rank, folder).filter(|_| is_training) {
            return number;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the number of the process of a rank; `None` if there is none. A process that answers a question of
/// `launch` has a rank too, but does not train.
fn find_process(rank: u32, folder: &Path) -> Option<u32> {
    let numbers = fs::read_dir("/proc").expect("Linux").flatten();
    let mut numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.find(|number| {
        let has = |file: &str, word: &str| {
            let words = fs::read(format!("/proc/{number}/{file}")).unwrap_or_default();
            words.split(|byte| *byte == 0).any(|other| other == word.as_bytes())
        };
        has("environ", &format!("OMPI_COMM_WORLD_RANK={rank}"))
            && !has("cmdline", "--answer")
            && fs::read_link(format!("/proc/{number}/cwd")).is_ok_and(|cwd| cwd == folder)
    })
}

/// Returns the number of the launcher that has started the processes of a launched run; `None` if there is none.
fn find_launcher(folder: &Path) -> Option<u32> {
    let numbers = fs::read_dir("/proc").expect("Linux").flatten();
    let mut numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.find(|number| {
        let read = |file: &str| fs::read(format!("/proc/{number}/{file}")).unwrap_or_default();
        // A launcher that asks a question has no mark.
        let environment = String::from_utf8_lossy(&read("environ")).into_owned();
        read("comm").starts_with(b"mpirun")
            && environment
                .split('\0')
                .any(|word| word.starts_with("PIPEWRIGHT_LAUNCHED=") && word.contains(",mark="))
            && fs::read_link(format!("/proc/{number}/cwd")).is_ok_and(|cwd| cwd == folder)
    })
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
