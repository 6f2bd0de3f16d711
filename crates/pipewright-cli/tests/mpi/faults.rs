//! A long trial, run by hand: a run of four processes on two hosts meets many faults, ends without help, and
//! has the results of an undisturbed run, to the bit.
//!
//! `PIPEWRIGHT_FAULTS` is the number of faults, by default 33, and `PIPEWRIGHT_SEED` chooses their moments.
//! The hosts are network namespaces of this machine, and each has a file system in memory for its copies.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::hosts::{Disk, Hosts, Memories, launch_on, said_in, spawn_saying};
use super::{figures, find_launcher, find_process, folder, train_on_threads};

/// The steps of the run for each fault. The trial needs fewer, and the run ends by itself after the last
/// fault.
const STEPS_PER_FAULT: u64 = 40;

/// The longest time from a fault to the next step.
const PATIENCE: Duration = Duration::from_secs(120);

/// The faults of the trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// A process is killed at any moment: in a step, in the update, or while a copy is written.
    Kill,
    /// The leader is killed at any moment.
    KillLeader,
    /// A process is killed while a checkpoint is written.
    KillInCheckpoint,
    /// A process is killed, and one of the processes that resume the run too.
    KillInResume,
    /// All processes of a host are killed.
    KillHost,
    /// All processes of a host are killed, and its memory is lost.
    LoseHost,
    /// A process is stopped, and stays so.
    Stop,
    /// A process is killed when it has the gradient norm and has not updated its parameters.
    KillInUpdate,
    /// A process is stopped at the same moment, and stays so.
    StopInUpdate,
    /// The cable between the hosts is cut, and mended after the run has continued without the second host.
    CutLink,
    /// The disk of the run's folder is full for a while.
    FullDisk,
    /// `mpirun` is killed.
    KillLauncher,
    /// `mpirun` is stopped, and stays so.
    StopLauncher,
    /// The daemon that `mpirun` has on the second host is killed.
    KillDaemon,
    /// All processes of the second host are stopped, and stay so, and its daemon too.
    StopHost,
}

const FAULTS: [Fault; 15] = [
    Fault::Kill,
    Fault::LoseHost,
    Fault::KillInCheckpoint,
    Fault::KillHost,
    Fault::KillInUpdate,
    Fault::KillLeader,
    Fault::CutLink,
    Fault::KillInResume,
    Fault::StopInUpdate,
    Fault::FullDisk,
    Fault::Stop,
    Fault::KillLauncher,
    Fault::KillDaemon,
    Fault::StopLauncher,
    Fault::StopHost,
];

/// The faults of the processes by themselves. Each happens when its file is in the folder of the trial.
const INJECTED: &str = "kill-in-update:1:file=kill,stop-in-update:1:file=stop";

/// A disturbed run.
struct Trial {
    folder: PathBuf,
    hosts: Hosts,
    memories: Memories,
    random: u64,
}

impl Trial {
    /// Returns a random number below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        // SplitMix64 (Steele, Lea and Flood, 2014).
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    /// Returns the newest complete line of the metrics that contains `part`. Only this line is parsed: if all
    /// lines were, the run would take many steps meanwhile.
    fn newest(&self, part: &str) -> Option<Value> {
        let metrics = fs::read(self.folder.join("out/metrics.jsonl")).unwrap_or_default();
        let metrics = String::from_utf8_lossy(&metrics);
        let mut lines = metrics.lines().rev().filter(|line| line.contains(part));
        lines.find_map(|line| serde_json::from_str(line).ok())
    }

    /// Returns the number of the newest restart; 0 if there was none. The restarts in the metrics are not
    /// counted, because a restart from an older state removes lines.
    fn restart(&self) -> u64 {
        self.newest(r#""event":"restart""#).and_then(|line| line["restart"].as_u64()).unwrap_or(0)
    }

    /// Returns the last step in the metrics.
    fn step(&self) -> u64 {
        self.newest("").and_then(|line| line["step"].as_u64()).unwrap_or(0)
    }

    /// Returns the number of the process of a rank, once it has started.
    fn process(&self, rank: u32) -> u32 {
        let found = Cell::new(None);
        self.wait_until("a process", |trial| {
            found.set(find_process(rank, &trial.folder));
            found.get().is_some()
        });
        found.get().expect("it was found")
    }

    /// Returns whether a rank is on the second host.
    fn uses_second(&self) -> bool {
        let second = self.hosts.processes_of_second();
        let mut ranks = (0..4).filter_map(|rank| find_process(rank, &self.folder));
        ranks.any(|number| second.contains(&number.to_string()))
    }

    /// Returns the numbers of the daemons that `mpirun` has on the second host.
    fn daemons(&self) -> Vec<String> {
        let is_daemon = |number: &String| {
            let name = fs::read_to_string(format!("/proc/{number}/comm")).unwrap_or_default();
            ["orted", "prted"].contains(&name.trim())
        };
        self.hosts.processes_of_second().into_iter().filter(is_daemon).collect()
    }

    fn said(&self) -> String {
        said_in(&self.folder)
    }

    /// Waits until something is so. Fails if it takes too long.
    fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            assert!(start.elapsed() < PATIENCE, "{what}: {}", self.said());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends a signal to processes. Returns `false` if one of them has ended.
    fn kill(numbers: &[String], signal: &str) -> bool {
        let mut kill = Command::new("kill");
        let status = kill.arg(format!("-{signal}")).args(numbers).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    }

    fn signal_rank(&self, rank: u32, signal: &str) -> bool {
        Self::kill(&[self.process(rank).to_string()], signal)
    }

    /// Lets a fault happen, ends it if it does not end by itself, and waits for the next step. Returns the
    /// fault and the seconds from it to that step; `None` if its process had already ended, because the run
    /// had failed by itself.
    fn disturb(&mut self, fault: Fault) -> Option<(Fault, f64)> {
        let moment = self.below(200);
        std::thread::sleep(Duration::from_millis(moment));
        let is_of_second = matches!(
            fault,
            Fault::KillHost | Fault::LoseHost | Fault::CutLink | Fault::KillDaemon | Fault::StopHost
        );
        // A host that answered too late for the last restart has no rank that a fault could reach.
        let fault = if is_of_second && !self.uses_second() { Fault::Kill } else { fault };
        let (begun, restart) = self.inject(fault)?;
        self.wait_until("a restart", |trial| trial.restart() > restart);
        self.wait_until("the next step", |trial| {
            trial.newest("").is_some_and(|line| line["event"].is_null()) && trial.restart() > restart
        });
        Some((fault, begun.elapsed().as_secs_f64()))
    }

    /// Lets a fault happen, and ends it if it does not end by itself. Returns its time and the number of the
    /// newest restart before it; `None` if its process had already ended.
    fn inject(&mut self, fault: Fault) -> Option<(Instant, u64)> {
        let (mut begun, mut restart) = (Instant::now(), self.restart());
        let has_reached = match fault {
            Fault::Kill => self.signal_rank(1, "KILL"),
            Fault::KillLeader => self.signal_rank(0, "KILL"),
            Fault::Stop => self.signal_rank(1, "STOP"),
            Fault::KillLauncher | Fault::StopLauncher => {
                let launcher = find_launcher(&self.folder).map(|number| number.to_string());
                let signal = if fault == Fault::KillLauncher { "KILL" } else { "STOP" };
                launcher.is_some_and(|launcher| Self::kill(&[launcher], signal))
            }
            Fault::KillDaemon => Self::kill(&self.daemons(), "KILL"),
            Fault::StopHost => Self::kill(&self.hosts.processes_of_second(), "STOP"),
            Fault::KillHost => {
                Self::kill(&self.hosts.processes_of_second(), "KILL");
                true
            }
            Fault::LoseHost => {
                Self::kill(&self.hosts.processes_of_second(), "KILL");
                self.memories.lose_second();
                true
            }
            Fault::KillInCheckpoint => {
                let number = self.process(1).to_string();
                self.wait_until("a checkpoint", Self::is_saving);
                (begun, restart) = (Instant::now(), self.restart());
                Self::kill(&[number], "KILL")
            }
            Fault::KillInResume => {
                let first = self.process(1);
                let has_reached = Self::kill(&[first.to_string()], "KILL");
                self.wait_until("a resumption", |trial| {
                    find_process(1, &trial.folder).is_some_and(|number| number != first)
                });
                let moment = self.below(300);
                std::thread::sleep(Duration::from_millis(moment));
                restart = self.restart();
                self.signal_rank(1, "KILL") && has_reached
            }
            Fault::KillInUpdate | Fault::StopInUpdate => {
                let name = if fault == Fault::KillInUpdate { "kill" } else { "stop" };
                let file = self.folder.join(name);
                fs::write(&file, "").expect("the scratch folder takes files");
                self.wait_until("an update", |_| !file.exists());
                (begun, restart) = (Instant::now(), self.restart());
                true
            }
            Fault::CutLink => {
                self.hosts.cut();
                self.wait_until("a restart", |trial| trial.restart() > restart);
                self.hosts.mend();
                Self::kill(&self.hosts.processes_of_second(), "KILL");
                true
            }
            Fault::FullDisk => {
                self.fill_disk();
                true
            }
        };
        has_reached.then_some((begun, restart))
    }

    /// Returns whether a checkpoint is being written.
    fn is_saving(&self) -> bool {
        let mut entries = fs::read_dir(self.folder.join("out/checkpoints")).into_iter().flatten().flatten();
        entries.any(|entry| entry.file_name().to_string_lossy().starts_with(".saving-"))
    }

    /// Fills the disk until the run waits for space.
    fn fill_disk(&self) {
        let waits = |trial: &Self| trial.said().matches("waits for space").count();
        let (before, filling) = (waits(self), self.folder.join("out/filling"));
        // The write ends when the disk is full.
        let _ = fs::write(&filling, vec![0; DISK]);
        self.wait_until("a full disk", |trial| waits(trial) > before);
        fs::remove_file(filling).expect("the file");
    }
}

/// The bytes of the disk of the run's folder, and of the memory of each host.
const DISK: usize = 64 << 20;

/// Returns all tensors of a checkpoint by name, for any number of ranks.
fn tensors(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(checkpoint).expect("a checkpoint").map(|entry| entry.expect("an entry").path());
    let files = files.filter(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
    let tensors = files.flat_map(|path| {
        let bytes = fs::read(path).expect("a file");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
        let named = file.tensors().into_iter();
        named.map(|(name, view)| (name, view.data().to_vec())).collect::<Vec<_>>()
    });
    tensors.collect()
}

/// Returns the median and the largest of some seconds as text.
fn figures_of(mut seconds: Vec<f64>) -> String {
    seconds.sort_unstable_by(f64::total_cmp);
    match seconds.last() {
        Some(largest) => format!("median {:.1} s, largest {largest:.1} s", seconds[seconds.len() / 2]),
        None => "none".to_owned(),
    }
}

/// Returns all restarts of a run in their order. A restart from an older state than that of the restart
/// before it has moved its line to another file.
fn all_restarts(run: &Path) -> Vec<Value> {
    let files = fs::read_dir(run).expect("the run's folder").flatten().map(|entry| entry.path());
    let files = files.filter(|path| path.extension().is_some_and(|ending| ending == "jsonl"));
    let texts = files.map(|path| fs::read(path).expect("a file of the run"));
    let texts: Vec<String> = texts.map(|text| String::from_utf8_lossy(&text).into_owned()).collect();
    let lines = texts.iter().flat_map(|text| text.lines());
    let lines = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let restarts = lines.filter(|line| line["event"] == "restart");
    let restarts = restarts.filter_map(|line| Some((line["restart"].as_u64()?, line)));
    restarts.collect::<BTreeMap<u64, Value>>().into_values().collect()
}

/// Returns how many of these restarts computed how many complete steps again, as text.
fn steps_again(restarts: &[&Value]) -> String {
    let lost = |restart: &&Value| restart["failed_step"].as_u64().zip(restart["step"].as_u64());
    let lost: Vec<u64> =
        restarts.iter().filter_map(lost).map(|(failed, step)| failed.saturating_sub(step + 1)).collect();
    let times = |steps: u64| lost.iter().filter(|lost| **lost == steps).count();
    let more = lost.len() - times(0) - times(1);
    let largest = lost.iter().max().copied().unwrap_or(0);
    format!("none {} times, one {} times, more {more} times, at most {largest}", times(0), times(1))
}

/// Prints a line about a fault, so that a trial that fails has figures too.
#[expect(clippy::print_stderr, reason = "the figures of the trial are its result")]
fn print_fault(number: u64, count: u64, fault: Fault, seconds: f64) {
    eprintln!("fault {number} of {count}: {fault:?}: {seconds:.1} s to the next step");
}

/// Prints how many steps the restarts computed again, and how long the run took to continue after each fault.
/// `missed` faults found no process.
#[expect(clippy::print_stderr, reason = "the figures of the trial are its result")]
fn print_figures(restarts: &[Value], seconds: &BTreeMap<Fault, Vec<f64>>, missed: u64) {
    let faults = seconds.values().map(Vec::len).sum::<usize>();
    eprintln!("{faults} faults, {} restarts; {missed} further faults found no process", restarts.len());
    eprintln!("complete steps computed again: {}", steps_again(&restarts.iter().collect::<Vec<_>>()));
    for (state, place) in [
        ("memory", "the memory of all hosts"),
        ("neighbour", "the memory of a neighbour"),
        ("disk", "the disk"),
    ] {
        let of_state: Vec<&Value> = restarts.iter().filter(|restart| restart["state"] == state).collect();
        eprintln!("  from {place} ({} restarts): {}", of_state.len(), steps_again(&of_state));
    }
    let read: Vec<f64> =
        restarts.iter().filter_map(|restart| Some(restart["read_ms"].as_f64()? / 1000.0)).collect();
    eprintln!("finding and reading the state: {}", figures_of(read));
    eprintln!("from a fault to the next step: {}", figures_of(seconds.values().flatten().copied().collect()));
    for (fault, seconds) in seconds {
        eprintln!("  {fault:?} ({}): {}", seconds.len(), figures_of(seconds.clone()));
    }
}

/// Prints that an undisturbed run has the same results.
#[expect(clippy::print_stderr, reason = "the figures of the trial are its result")]
fn print_equality(steps: usize, tensors: usize) {
    eprintln!(
        "equal to an undisturbed run, to the bit: the losses and norms of {steps} steps, and {tensors} tensors of \
         parameters and moments"
    );
}

#[test]
#[ignore = "takes minutes, and needs root; see docs/processes.md"]
fn a_run_survives_many_faults() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (count, seed) = (number("PIPEWRIGHT_FAULTS").unwrap_or(33), number("PIPEWRIGHT_SEED").unwrap_or(1));
    let Some(hosts) = Hosts::new('f') else { panic!("network namespaces need root and iproute2") };
    let (scratch, alone) = (folder(), folder());
    let path = scratch.path().canonicalize().expect("it exists");
    let _disk = Disk::mount(path.join("out"), DISK).expect("mounting a file system needs root");
    let memories = Memories::mount(&path, &hosts, DISK).expect("mounting a file system needs root");
    let steps = format!("run.steps={}", STEPS_PER_FAULT * count);
    let set = ["pipeline.ranks=4", &steps, "run.timelines=0"];
    let copies = ["run.copy_every=1", "run.copies=neighbour", "run.copy_folder=memory"];
    // A host that is lost again and again would be left out for longer and longer.
    let disturbed = ["run.checkpoint_every=5", "run.grow=false", "run.deadline_seconds=3"];
    let disturbed = [&disturbed[..], &copies].concat();
    let mut command = launch_on(&path, &hosts, &["--restarts", "1000"], &[&set[..], &disturbed].concat());
    command.env("MPIEXEC_TIMEOUT", "3600").env("PIPEWRIGHT_FAULT", INJECTED);
    let mut child = spawn_saying(&mut command, &path);
    let mut trial = Trial { folder: path.clone(), hosts, memories, random: seed };
    let (mut seconds, mut missed) = (BTreeMap::<Fault, Vec<f64>>::new(), 0);
    trial.wait_until("the first steps", |trial| trial.step() > 5);
    for (number, fault) in (1..=count).zip(FAULTS.into_iter().cycle()) {
        let (fault, took) = loop {
            let disturbed = trial.disturb(fault);
            let from = trial.step();
            trial.wait_until("further steps", |trial| trial.step() > from + 3);
            match disturbed {
                Some(disturbed) => break disturbed,
                None => missed += 1,
            }
        };
        print_fault(number, count, fault, took);
        seconds.entry(fault).or_default().push(took);
    }
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(0), "{}", trial.said());
    print_figures(&all_restarts(&path.join("out")), &seconds, missed);
    let losses = figures(&path);
    let undisturbed = train_on_threads(alone.path(), &set);
    assert!(losses == undisturbed, "the losses and norms of an undisturbed run");
    let last = format!("out/checkpoints/step-{:08}", STEPS_PER_FAULT * count);
    let parameters = tensors(&path.join(&last));
    assert!(parameters == tensors(&alone.path().join(&last)), "its parameters and moments");
    print_equality(losses.len(), parameters.len());
}
