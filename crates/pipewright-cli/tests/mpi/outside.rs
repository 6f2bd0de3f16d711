//! Tests of a launched run that something outside of it disturbs: its launcher or any of its processes are killed or
//! stopped, or its folder is moved, removed or replaced.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use super::hosts::{said_in, spawn_saying};
use super::launch::{SETTINGS, launch, wait_for_step};
use super::{Folder, figures, find_launcher, find_process, folder, left_running, train_on_threads};

/// The ranks of the runs here.
const RANKS: u32 = 3;

/// The settings of a run of three ranks that does not end by itself, with a copy of its state after each step.
const ENDLESS: [&str; 8] = [
    "pipeline.ranks=3",
    "run.steps=10000000",
    "run.checkpoint_every=50",
    "run.keep_checkpoints=2",
    "run.timelines=0",
    "run.copy_every=1",
    "run.copy_folder=memory",
    "optimizer.schedule=constant",
];

/// The longest time from a fault to the next steps.
const PATIENCE: Duration = Duration::from_secs(180);

/// A process of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Launcher,
    Rank(u32),
}

impl Target {
    fn process(self, folder: &Path) -> Option<u32> {
        match self {
            Self::Launcher => find_launcher(folder),
            Self::Rank(rank) => find_process(rank, folder),
        }
    }
}

/// A launched run.
struct Disturbed {
    scratch: Folder,
    child: Child,
}

impl Disturbed {
    fn start() -> Self {
        let scratch = folder();
        let path = scratch.path().canonicalize().expect("it exists");
        fs::create_dir(path.join("memory")).expect("the scratch folder takes folders");
        let mut command = launch(&path, &["--restarts", "10000"], &ENDLESS);
        let child = spawn_saying(command.env("MPIEXEC_TIMEOUT", "36000"), &path);
        wait_for_step(&path, 5);
        Self { scratch, child }
    }

    fn path(&self) -> std::path::PathBuf {
        self.scratch.path().canonicalize().expect("it exists")
    }

    /// Sends a signal to all processes at once. Returns whether all of them existed.
    fn signal(&self, targets: &[Target], name: &str) -> bool {
        let path = self.path();
        let processes: Vec<String> =
            targets.iter().filter_map(|target| Some(target.process(&path)?.to_string())).collect();
        let all = processes.len() == targets.len();
        let mut kill = std::process::Command::new("kill");
        all && kill.arg(format!("-{name}")).args(processes).status().is_ok_and(|status| status.success())
    }

    /// Returns the number of the newest restart; 0 if there was none. A restart from an older state moves the lines of
    /// later ones to another file.
    fn restart(&self) -> u64 {
        let metrics = fs::read_to_string(self.path().join("out/metrics.jsonl")).unwrap_or_default();
        let mut lines = metrics.lines().rev().filter(|line| line.contains(r#""event":"restart""#));
        let newest = lines.find_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        newest.and_then(|line| line["restart"].as_u64()).unwrap_or(0)
    }

    /// Waits until the run has restarted after `restart`, and has taken `steps` further steps.
    fn wait_for_restart(&self, restart: u64, steps: usize) {
        let (path, start) = (self.path(), Instant::now());
        let lines = || fs::read_to_string(path.join("out/metrics.jsonl")).unwrap_or_default().lines().count();
        let mut least = None;
        loop {
            if self.restart() > restart {
                let lines = lines();
                // A further restart may remove lines.
                let from = lines.min(least.unwrap_or(lines));
                if lines >= from + steps {
                    return;
                }
                least = Some(from);
            }
            assert!(start.elapsed() < PATIENCE, "the run does not continue: {}", said_in(&path));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the run. Checks that it has the figures of an undisturbed one and leaves nothing.
    fn end(mut self) {
        super::signal(self.child.id(), "TERM");
        let status = self.child.wait().expect("it ends");
        let path = self.path();
        let said = said_in(&path);
        assert_eq!(status.code(), Some(5), "{said}");
        assert_eq!(left_running(&path), 0, "nothing is left running");
        assert_eq!(fs::read_dir(path.join("memory")).expect("a folder").count(), 0, "no copies stay");
        assert_eq!(hidden(&path), [""; 0], "no mark stays");
        let (found, alone) = (figures(&path), folder());
        let steps = format!("run.steps={}", found.len());
        let set = ["pipeline.ranks=3", "optimizer.schedule=constant", "run.timelines=0", &steps];
        let undisturbed = train_on_threads(alone.path(), &[&SETTINGS[4..], &set].concat());
        assert!(found == undisturbed, "the figures of an undisturbed run: {said}");
    }
}

/// Returns the hidden files of a folder.
fn hidden(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(".pipewright")).collect()
}

#[test]
fn a_run_survives_its_launcher() {
    let run = Disturbed::start();
    let check = |targets: &[Target], name: &str| {
        let restart = run.restart();
        assert!(run.signal(targets, name), "{targets:?}");
        run.wait_for_restart(restart, 3);
    };
    check(&[Target::Launcher], "KILL");
    check(&[Target::Launcher, Target::Rank(0), Target::Rank(2)], "STOP");
    run.end();
}

/// Disturbs the folder of a run. Checks that the run ends with one report and is not started again.
fn check_lost(change: impl Fn(&Path), expected: &str) {
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    let set = ["run.steps=1000000", "optimizer.schedule=constant", "run.checkpoint_every=1"];
    let mut child = spawn_saying(&mut launch(&path, &[], &set), &path);
    wait_for_step(&path, 3);
    change(&path.join("out"));
    let status = child.wait().expect("it ends");
    let said = said_in(&path);
    assert_eq!(status.code(), Some(4), "{said}");
    assert_eq!(said.matches("error:").count(), 1, "{said}");
    assert!(said.contains(expected) && said.contains("saved"), "{said}");
    assert!(!said.contains("the run continues") && !said.contains("start again\n"), "{said}");
    assert!(!path.join("out/config.toml").exists(), "no run begins: {said}");
    assert_eq!((left_running(&path), hidden(&path)), (0, Vec::new()), "nothing is left");
}

#[test]
fn a_run_whose_folder_is_lost_ends_and_is_not_started_again() {
    let aside = |out: &Path| fs::rename(out, out.with_extension("aside")).expect("a free name");
    check_lost(aside, "the folder was moved or removed");
    // Another process may write into the folder while it is removed, and find it without its lock.
    check_lost(|out| while fs::remove_dir_all(out).is_err() {}, "nothing more is written here");
    let replaced = |out: &Path| {
        aside(out);
        fs::create_dir_all(out.join("checkpoints")).expect("a free name");
    };
    check_lost(replaced, "this is not the folder any more");
}

/// Returns a random number below `limit`.
fn below(state: &mut u64, limit: u64) -> u64 {
    // SplitMix64 (Steele, Lea and Flood, 2014).
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) % limit
}

/// Kills or stops random sets of the launcher and the ranks at random moments, also while the run restarts.
#[test]
#[ignore = "takes half an hour; see docs/processes.md"]
fn a_run_survives_faults_from_outside() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (count, mut random) =
        (number("PIPEWRIGHT_FAULTS").unwrap_or(200), number("PIPEWRIGHT_SEED").unwrap_or(1));
    let run = Disturbed::start();
    let mut done = 0;
    while done < count {
        std::thread::sleep(Duration::from_millis(below(&mut random, 300)));
        let (chosen, is_stop) = (1 + below(&mut random, (2 << RANKS) - 1), below(&mut random, 2) == 1);
        let all = std::iter::once(Target::Launcher).chain((0..RANKS).map(Target::Rank));
        let targets: Vec<Target> =
            all.enumerate().filter(|(bit, _)| chosen >> bit & 1 == 1).map(|(_, target)| target).collect();
        let (name, restart, begun) = (if is_stop { "STOP" } else { "KILL" }, run.restart(), Instant::now());
        if !run.signal(&targets, name) {
            continue;
        }
        done += 1;
        // Every third fault meets a run that restarts.
        if below(&mut random, 3) > 0 {
            run.wait_for_restart(restart, 2);
        }
        print_fault(done, name, &targets, begun.elapsed());
    }
    run.wait_for_restart(0, 3);
    run.end();
}

#[expect(clippy::print_stderr, reason = "the figures of the trial are its result")]
fn print_fault(number: u64, name: &str, targets: &[Target], took: Duration) {
    eprintln!("fault {number}: {name} {targets:?}: {:.1} s", took.as_secs_f64());
}
