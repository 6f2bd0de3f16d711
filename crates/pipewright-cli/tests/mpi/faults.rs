//! A long trial, run by hand: a run of four processes on two hosts meets many faults, ends without help, and
//! has the results of an undisturbed run, to the bit.
//!
//! `PIPEWRIGHT_FAULTS` is the number of faults, by default 27, and `PIPEWRIGHT_SEED` chooses their moments.
//! The hosts are network namespaces of this machine, and each has a file system in memory for its copies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::hosts::{Disk, Hosts, Memories, launch_on};
use super::{figures, folder, pipewright, process_of, restarts, with_overrides, words};

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
    /// The cable between the hosts is cut, and mended after the run has continued without the second host.
    CutLink,
    /// The disk of the run's folder is full for a while.
    FullDisk,
}

const FAULTS: [Fault; 9] = [
    Fault::Kill,
    Fault::LoseHost,
    Fault::KillInCheckpoint,
    Fault::KillHost,
    Fault::KillLeader,
    Fault::CutLink,
    Fault::KillInResume,
    Fault::FullDisk,
    Fault::Stop,
];

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

    fn lines(&self) -> Vec<Value> {
        let metrics = fs::read_to_string(self.folder.join("out/metrics.jsonl")).unwrap_or_default();
        metrics.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Returns the restarts in the metrics.
    fn restarts(&self) -> Vec<Value> {
        restarts(&self.folder)
    }

    /// Returns the last step in the metrics.
    fn step(&self) -> u64 {
        self.lines().last().and_then(|line| line["step"].as_u64()).unwrap_or(0)
    }

    fn said(&self) -> String {
        fs::read_to_string(self.folder.join("said")).unwrap_or_default()
    }

    /// Waits until something is so. Fails if it takes too long or the run has ended.
    fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            assert!(start.elapsed() < PATIENCE, "{what}: {}", self.said());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends a signal to processes, which may have ended.
    fn kill(numbers: &[String], signal: &str) {
        let _ = Command::new("kill").arg(format!("-{signal}")).args(numbers).stderr(Stdio::null()).status();
    }

    fn signal_rank(&self, rank: u32, signal: &str) {
        Self::kill(&[process_of(rank, &self.folder).to_string()], signal);
    }

    /// Lets a fault happen, and ends it if it does not end by itself.
    fn disturb(&mut self, fault: Fault) {
        let (restarts, moment) = (self.restarts().len(), self.below(200));
        std::thread::sleep(Duration::from_millis(moment));
        match fault {
            // A host that answered too late for the last restart has no process that a fault could reach.
            Fault::KillHost | Fault::LoseHost | Fault::CutLink
                if self.hosts.processes_of_second().is_empty() =>
            {
                self.signal_rank(1, "KILL");
            }
            Fault::Kill => self.signal_rank(1, "KILL"),
            Fault::KillLeader => self.signal_rank(0, "KILL"),
            Fault::Stop => self.signal_rank(1, "STOP"),
            Fault::KillHost => Self::kill(&self.hosts.processes_of_second(), "KILL"),
            Fault::LoseHost => {
                Self::kill(&self.hosts.processes_of_second(), "KILL");
                self.memories.lose_second();
            }
            Fault::KillInCheckpoint => {
                let number = process_of(1, &self.folder).to_string();
                let is_saving = |trial: &Self| {
                    let entries =
                        fs::read_dir(trial.folder.join("out/checkpoints")).into_iter().flatten().flatten();
                    entries
                        .into_iter()
                        .any(|entry| entry.file_name().to_string_lossy().starts_with(".saving-"))
                };
                self.wait_until("a checkpoint", is_saving);
                Self::kill(&[number], "KILL");
            }
            Fault::KillInResume => {
                let first = process_of(1, &self.folder);
                Self::kill(&[first.to_string()], "KILL");
                self.wait_until("a resumption", |trial| process_of(1, &trial.folder) != first);
                let moment = self.below(300);
                std::thread::sleep(Duration::from_millis(moment));
                self.signal_rank(1, "KILL");
            }
            Fault::CutLink => {
                self.hosts.cut();
                self.wait_until("a restart", |trial| trial.restarts().len() > restarts);
                self.hosts.mend();
                Self::kill(&self.hosts.processes_of_second(), "KILL");
            }
            Fault::FullDisk => {
                let waits = |trial: &Self| trial.said().matches("waits for space").count();
                let (before, filling) = (waits(self), self.folder.join("out/filling"));
                // The write ends when the disk is full.
                let _ = fs::write(&filling, vec![0; DISK]);
                self.wait_until("a full disk", |trial| waits(trial) > before);
                fs::remove_file(filling).expect("the file");
            }
        }
        self.wait_until("a restart", |trial| trial.restarts().len() > restarts);
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

/// Prints how many steps the restarts computed again, and how long the run took to continue after each fault.
#[expect(clippy::print_stderr, reason = "the figures of the trial are its result")]
fn print_figures(restarts: &[Value], seconds: BTreeMap<Fault, Vec<f64>>) {
    let lost = |restart: &Value| restart["failed_step"].as_u64().zip(restart["step"].as_u64());
    let lost: Vec<u64> =
        restarts.iter().filter_map(lost).map(|(failed, step)| failed.saturating_sub(step + 1)).collect();
    let from = |state: &str| restarts.iter().filter(|restart| restart["state"] == state).count();
    let [memory, neighbour, disk] = ["memory", "neighbour", "disk"].map(from);
    eprintln!(
        "{} faults, {} restarts: {memory} from the memory of all hosts, {neighbour} from a neighbour's, {disk} from the \
         disk",
        seconds.values().map(Vec::len).sum::<usize>(),
        restarts.len()
    );
    let times = |steps: u64| lost.iter().filter(|lost| **lost == steps).count();
    eprintln!(
        "complete steps computed again: none {} times, one {} times, more {} times, at most {:?}",
        times(0),
        times(1),
        lost.len() - times(0) - times(1),
        lost.iter().max()
    );
    let read: Vec<f64> =
        restarts.iter().filter_map(|restart| Some(restart["read_ms"].as_f64()? / 1000.0)).collect();
    eprintln!("finding and reading the state: {}", figures_of(read));
    eprintln!("from a fault to the next step: {}", figures_of(seconds.values().flatten().copied().collect()));
    for (fault, seconds) in seconds {
        eprintln!("  {fault:?} ({}): {}", seconds.len(), figures_of(seconds));
    }
}

#[test]
#[ignore = "takes minutes, and needs root; see docs/processes.md"]
fn a_run_survives_many_faults() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (count, seed) = (number("PIPEWRIGHT_FAULTS").unwrap_or(27), number("PIPEWRIGHT_SEED").unwrap_or(1));
    let Some(hosts) = Hosts::new('f') else { panic!("network namespaces need root and iproute2") };
    let (scratch, alone) = (folder(), folder());
    let path = scratch.path().canonicalize().expect("it exists");
    let _disk = Disk::mount(path.join("out"), DISK).expect("mounting a file system needs root");
    let memories = Memories::mount(&path, &hosts, DISK).expect("mounting a file system needs root");
    let steps = format!("run.steps={}", STEPS_PER_FAULT * count);
    let set = ["pipeline.ranks=4", &steps, "run.timelines=0", "run.deadline_seconds=3"];
    let copies = ["run.copy_every=1", "run.copies=neighbour", "run.copy_folder=memory"];
    // A host that is lost again and again would be left out for longer and longer.
    let disturbed = [&["run.checkpoint_every=5", "run.grow=false"], &copies[..]].concat();
    let mut command = launch_on(&path, &hosts, &["--restarts", "1000"], &[&set[..], &disturbed].concat());
    command.env("MPIEXEC_TIMEOUT", "3600");
    let said = fs::File::create(path.join("said")).expect("the scratch folder takes files");
    let mut child = command.stdout(Stdio::null()).stderr(said).spawn().expect("sh is everywhere");
    let mut trial = Trial { folder: path.clone(), hosts, memories, random: seed };
    let mut seconds: BTreeMap<Fault, Vec<f64>> = BTreeMap::new();
    trial.wait_until("the first steps", |trial| trial.step() > 5);
    for fault in FAULTS.into_iter().cycle().take(usize::try_from(count).expect("a small number")) {
        let (begun, restarts) = (Instant::now(), trial.restarts().len());
        trial.disturb(fault);
        trial.wait_until("the next step", |trial| {
            trial.lines().last().is_some_and(|line| line["event"].is_null())
                && trial.restarts().len() > restarts
        });
        seconds.entry(fault).or_default().push(begun.elapsed().as_secs_f64());
        let from = trial.step();
        trial.wait_until("further steps", |trial| trial.step() > from + 3);
    }
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(0), "{}", trial.said());
    let mut undisturbed = Command::new(pipewright());
    with_overrides(undisturbed.current_dir(alone.path()), &set);
    let output = undisturbed.output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "the undisturbed run: {}", words(&output));
    assert!(figures(&path) == figures(alone.path()), "the losses and norms of an undisturbed run");
    let last = format!("out/checkpoints/step-{:08}", STEPS_PER_FAULT * count);
    assert!(tensors(&path.join(&last)) == tensors(&alone.path().join(&last)), "its parameters and moments");
    print_figures(&trial.restarts(), seconds);
}
