//! A scratch folder with a very short training run, the commands that run in it, and what they leave.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use pipewright_run::settings::{Base, Settings, Surroundings};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::scratch;

const OPTIMIZER: &str = "\
[optimizer]
learning_rate = 0.01
schedule = \"cosine\"
warmup_steps = 1
";

/// The longest time that a test waits for a run.
const PATIENCE: Duration = Duration::from_secs(60);

/// The number of a step, and its exact loss and gradient norm.
pub(crate) type Figures = (u64, String, String);

pub(crate) struct Run(TempDir);

impl Run {
    pub(crate) fn new() -> Self {
        Self::of(&(scratch::small(2, 4, 40) + OPTIMIZER))
    }

    /// Returns a folder with `text.txt` and with `config` as `small.toml`.
    pub(crate) fn of(config: &str) -> Self {
        Self(scratch::folder(config))
    }

    /// Returns a folder without files.
    pub(crate) fn empty() -> Self {
        Self(tempfile::tempdir().expect("a scratch folder"))
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.path("out")
    }

    pub(crate) fn has_config(&self) -> bool {
        self.path("out/config.toml").exists()
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub(crate) fn read_json(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).expect("JSON")
    }

    pub(crate) fn read_toml(&self, name: &str) -> toml::Table {
        self.read(name).parse().expect("TOML")
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).expect("the scratch folder takes files");
    }

    /// Returns the binary, to be run in the folder.
    pub(crate) fn binary(&self) -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
        command.current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    fn process(&self, arguments: &[&str]) -> Command {
        let mut command = self.binary();
        command.args(arguments);
        command
    }

    /// Runs a command and waits for its end.
    pub(crate) fn command(&self, arguments: &[&str]) -> Output {
        self.process(arguments).output().expect("the binary starts")
    }

    /// Runs a command with overrides. Returns the exit code, standard output and standard error.
    pub(crate) fn call(&self, arguments: &[&str], set: &[&str]) -> (Option<i32>, String, String) {
        finished(self.process(arguments).args(set.iter().flat_map(|set| ["--set", *set])))
    }

    /// Runs a command that succeeds. Returns its standard output and standard error.
    pub(crate) fn succeed(&self, arguments: &[&str], set: &[&str]) -> (String, String) {
        let (code, out, said) = self.call(arguments, set);
        assert_eq!(code, Some(0), "{arguments:?} {set:?}: {said}");
        (out, said)
    }

    /// Runs a command that succeeds. Returns its standard output.
    pub(crate) fn print(&self, arguments: &[&str]) -> String {
        self.succeed(arguments, &[]).0
    }

    /// Runs a command that succeeds, and that writes `expected` to standard output.
    pub(crate) fn prints(&self, arguments: &[&str], set: &[&str], expected: &str) {
        let (out, _) = self.succeed(arguments, set);
        assert!(out.contains(expected), "{arguments:?} {set:?}: {out}\nhas not: {expected}");
    }

    /// Runs a command that succeeds, and that writes `expected` to standard error, in one line or as it is wrapped.
    pub(crate) fn says(&self, arguments: &[&str], set: &[&str], expected: &str) {
        let (_, said) = self.succeed(arguments, set);
        let is_said = said.contains(expected) || in_one_line(&said).contains(expected);
        assert!(is_said, "{arguments:?} {set:?}: {said}\nhas not: {expected}");
    }

    /// Runs a command that succeeds. Returns the JSON that it prints.
    pub(crate) fn json(&self, arguments: &[&str], set: &[&str]) -> Value {
        let (out, _) = self.succeed(&[arguments, &["--format", "json"]].concat(), set);
        serde_json::from_str(&out).expect("JSON")
    }

    /// Runs a command that refuses its input with a message that contains `expected`, in one line or as it is wrapped.
    pub(crate) fn refuse(&self, arguments: &[&str], set: &[&str], expected: &str) {
        self.fail(2, arguments, set, &[expected]);
    }

    /// Like [`Run::refuse`], with another exit code and several texts.
    pub(crate) fn fail(&self, expected_code: i32, arguments: &[&str], set: &[&str], expected: &[&str]) {
        let (code, _, said) = self.call(arguments, set);
        assert_eq!(code, Some(expected_code), "{arguments:?} {set:?}: {said}");
        let is_missing = |text: &&&str| !said.contains(**text) && !in_one_line(&said).contains(**text);
        let missing = expected.iter().find(is_missing);
        assert_eq!(missing, None, "{arguments:?} {set:?}: {said}");
    }

    /// Checks that `check` and `train` refuse `small.toml` with overrides.
    pub(crate) fn refuse_settings(&self, set: &[&str], expected: &str) {
        for command in ["check", "train"] {
            self.refuse(&[command, "small.toml"], set, expected);
        }
    }

    /// Starts a command with overrides, without waiting for it.
    pub(crate) fn start(&self, command: &str, arguments: &[&str], set: &[&str]) -> Child {
        self.start_heard(command, arguments, set, Stdio::null())
    }

    /// Like [`Run::start`], with a place for standard error.
    pub(crate) fn start_heard(
        &self,
        command: &str,
        arguments: &[&str],
        set: &[&str],
        stderr: Stdio,
    ) -> Child {
        let set = set.iter().flat_map(|set| ["--set", set]);
        let all: Vec<&str> = [command].into_iter().chain(arguments.iter().copied()).chain(set).collect();
        self.process(&all).stderr(stderr).spawn().expect("the binary starts")
    }

    /// Like [`Run::start`]. Standard error goes to the file `said`.
    pub(crate) fn start_saying(&self, command: &str, arguments: &[&str], set: &[&str]) -> Child {
        let said = fs::File::create(self.path("said")).expect("the scratch folder takes files");
        self.start_heard(command, arguments, set, said.into())
    }

    /// Returns what a command has said that [`Run::start_saying`] has started.
    pub(crate) fn said(&self) -> String {
        self.read("said")
    }

    /// Like [`Run::start`], in a process that ignores SIGHUP, as `nohup` starts it.
    pub(crate) fn start_without_hangup(&self, command: &str, arguments: &[&str], set: &[&str]) -> Child {
        let mut shell = self.shell("trap '' HUP; exec \"$0\" \"$@\"");
        shell.arg(command).args(arguments).args(set.iter().flat_map(|set| ["--set", set]));
        shell.stderr(Stdio::null()).spawn().expect("a shell")
    }

    /// Returns a shell that runs a script in the folder. The binary is `$0` in the script.
    pub(crate) fn shell(&self, script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell
            .current_dir(self.0.path())
            .args(["-c", script])
            .arg(assert_cmd::cargo::cargo_bin!("pipewright"));
        shell.stdin(Stdio::null());
        shell
    }

    /// Runs a command that must end soon, even if it finds a file without an end.
    pub(crate) fn command_within(&self, seconds: u64, arguments: &[&str]) -> Output {
        let child = self.process(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("the binary starts");
        let start = Instant::now();
        while child.try_wait().expect("the process is ours").is_none() {
            if start.elapsed() > Duration::from_secs(seconds) {
                child.kill().expect("the process is ours");
                panic!("{arguments:?} does not end");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        child.wait_with_output().expect("its output is short")
    }

    /// Trains in this process.
    pub(crate) fn train(&self, set: &[&str]) {
        let working_folder = self.0.path().to_owned();
        let surroundings = Surroundings { working_folder, variable: |_| None };
        let loaded = Settings::load(Base::File(&self.path("small.toml")), &texts(set), &surroundings);
        let loaded = loaded.unwrap_or_else(|error| panic!("{set:?}: {error}"));
        let out = loaded.settings.run.out.clone();
        ended(pipewright_run::Run::new(loaded), &out, set);
    }

    /// Resumes in this process. Paths in `set` must be absolute.
    pub(crate) fn resume(&self, set: &[&str]) {
        ended(pipewright_run::Run::reopen(self.out()).set(texts(set)), &self.out(), set);
    }

    /// Returns all lines of the metrics: steps and events.
    pub(crate) fn metrics(&self) -> Vec<Value> {
        self.metrics_in("out")
    }

    /// Returns all lines of the metrics in the folder of another run.
    pub(crate) fn metrics_in(&self, out: &str) -> Vec<Value> {
        let text = self.read(&format!("{out}/metrics.jsonl"));
        text.lines().map(|line| serde_json::from_str(line).expect("a line is an object")).collect()
    }

    /// Returns the lines of the metrics that are steps.
    pub(crate) fn steps(&self) -> Vec<Value> {
        self.metrics().into_iter().filter(|line| line.get("event").is_none()).collect()
    }

    /// Returns the lines of the metrics that are events, such as a restart.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.metrics().into_iter().filter(|line| line.get("event").is_some()).collect()
    }

    /// Returns the loss and the gradient norm of each step.
    pub(crate) fn losses(&self) -> Vec<[f64; 2]> {
        numbers(&self.steps())
    }

    /// Trains with the command and with overrides. Returns the loss and the gradient norm of each step.
    pub(crate) fn trained(&self, config: &str, set: &[&str]) -> Vec<[f64; 2]> {
        self.succeed(&["train", config], set);
        self.losses()
    }

    /// Returns each rank's measured peak of the last step, in bytes.
    pub(crate) fn peaks(&self) -> Vec<f64> {
        let step = self.steps().pop().expect("a step");
        let ranks = step["peak_bytes"].as_array().expect("a list").iter();
        ranks.map(|bytes| bytes.as_f64().expect("bytes")).collect()
    }

    /// Returns the memory of each rank that `check` estimates.
    pub(crate) fn estimates(&self, config: &str, set: &[&str]) -> Vec<Value> {
        self.json(&["check", config], set)["memory"]["ranks"].as_array().expect("a list").clone()
    }

    /// Trains, and checks that each rank's peak is near what `check` estimates. The estimate does not have the workspace of
    /// products.
    pub(crate) fn check_peaks(&self, config: &str, set: &[&str]) {
        const WORKSPACE: f64 = 2.5e6;
        const ERROR: f64 = 0.03;
        let estimates = self.estimates(config, set);
        self.succeed(&["train", config], set);
        for (peak, estimate) in self.peaks().iter().zip(&estimates) {
            let missing = peak - estimate["total"].as_f64().expect("bytes");
            let is_near = (-ERROR * peak..=ERROR * peak + WORKSPACE).contains(&missing);
            assert!(is_near, "{set:?}: {missing} bytes of {peak} are missing in {estimate}");
        }
    }

    /// Returns the figures of all complete lines of the metrics that are steps. Checks that the steps are 1,
    /// 2, 3 and so on.
    pub(crate) fn figures(&self) -> Vec<Figures> {
        let metrics = fs::read_to_string(self.path("out/metrics.jsonl")).unwrap_or_default();
        let whole = &metrics[..metrics.rfind('\n').map_or(0, |end| end + 1)];
        let figures = |line: &str| {
            let value: Value = serde_json::from_str(line).expect("a line is an object");
            let step = value["step"].as_u64().expect("a step");
            let figures = (step, value["loss"].to_string(), value["grad_norm"].to_string());
            // A line may be an event, such as a restart.
            value.get("event").is_none().then_some(figures)
        };
        let figures: Vec<Figures> = whole.lines().filter_map(figures).collect();
        assert!((1..).zip(&figures).all(|(step, figures)| figures.0 == step), "each step once: {figures:?}");
        figures
    }

    pub(crate) fn checkpoints(&self) -> Vec<String> {
        let folder = fs::read_dir(self.path("out/checkpoints")).expect("a folder");
        let name = |entry: std::io::Result<fs::DirEntry>| {
            entry.expect("an entry").file_name().to_string_lossy().into_owned()
        };
        let mut names: Vec<String> = folder.map(name).filter(|name| name != "lock").collect();
        names.sort();
        names
    }

    /// Returns the hash of each file of the newest checkpoint, by name.
    pub(crate) fn hashes(&self) -> Vec<(String, String)> {
        let names = self.checkpoints();
        let newest = names.iter().filter(|name| name.starts_with("step-")).max().expect("a checkpoint");
        hashes_of(&self.path("out/checkpoints").join(newest))
    }

    /// Changes the first file of a checkpoint, and corrects the manifest, as another program could do.
    pub(crate) fn change_checkpoint(&self, name: &str, change: impl Fn(&mut Vec<u8>)) {
        let checkpoint = self.path("out/checkpoints").join(name);
        let path = checkpoint.join("rank-0000.safetensors");
        let mut bytes = fs::read(&path).expect("a file");
        change(&mut bytes);
        let manifest = checkpoint.join("manifest.json");
        let text = fs::read_to_string(&manifest).expect("a manifest");
        let json: Value = serde_json::from_str(&text).expect("JSON");
        let hash = json["shards"][0]["hash"].as_str().expect("a hash");
        let text = text.replace(hash, blake3::hash(&bytes).to_hex().as_str());
        let (body, _) = text.rsplit_once(",\n  \"hash\"").expect("the manifest's own hash");
        let own_hash = blake3::hash(body.as_bytes()).to_hex();
        let sealed = format!("{body},\n  \"hash\": \"{own_hash}\"\n}}\n");
        fs::write(path, bytes).and_then(|()| fs::write(manifest, sealed)).expect("files");
    }

    /// Waits until the metrics contain this step.
    pub(crate) fn wait_for_step(&self, step: u64) {
        self.wait_until(|| self.figures().len() as u64 >= step);
    }

    pub(crate) fn wait_for_metrics_file(&self) {
        self.wait_until(|| self.path("out/metrics.jsonl").exists());
    }

    pub(crate) fn wait_until(&self, is_so: impl Fn() -> bool) {
        let start = Instant::now();
        while !is_so() {
            let said = fs::read_to_string(self.path("said")).unwrap_or_default();
            let steps = self.figures().len();
            assert!(start.elapsed() < PATIENCE, "the run does not get there; {steps} steps: {said}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn texts(set: &[&str]) -> Vec<String> {
    set.iter().map(|text| (*text).to_owned()).collect()
}

/// Trains, and waits until the locks of the folder are free: a process that another test starts has inherited them until
/// it executes its program.
fn ended(run: pipewright_run::Run, out: &Path, set: &[&str]) {
    run.train().unwrap_or_else(|error| panic!("{set:?}: {error}"));
    let start = Instant::now();
    for lock in ["checkpoints/lock", "metrics.jsonl"].map(|name| out.join(name)) {
        while fs::File::open(&lock).is_ok_and(|file| file.try_lock().is_err()) {
            assert!(start.elapsed() < PATIENCE, "{} stays locked", lock.display());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The longest that a command of a test runs.
const LONGEST: Duration = Duration::from_secs(600);

/// Runs a command to its end. Returns the exit code, standard output and standard error.
pub(crate) fn finished(command: &mut Command) -> (Option<i32>, String, String) {
    let command = std::mem::replace(command, Command::new("true"));
    let output = assert_cmd::Command::from_std(command).timeout(LONGEST).output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Returns the words of a message, which is wrapped in the middle of sentences.
pub(crate) fn in_one_line(said: &str) -> String {
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the loss and the gradient norm of each step.
pub(crate) fn numbers(steps: &[Value]) -> Vec<[f64; 2]> {
    let numbers = |step: &Value| ["loss", "grad_norm"].map(|key| step[key].as_f64().expect("a number"));
    steps.iter().map(numbers).collect()
}

/// Checks that numbers differ by at most this share of the expected ones.
#[track_caller]
pub(crate) fn assert_near(found: &[[f64; 2]], expected: &[[f64; 2]], share: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let are_near = found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= share * b.abs());
        assert!(are_near, "{what}, step {step}: {found:?} for {expected:?}");
    }
}

/// Returns the hash of each file of a checkpoint, by name.
pub(crate) fn hashes_of(checkpoint: &Path) -> Vec<(String, String)> {
    let files = fs::read_dir(checkpoint).expect("a folder").map(|entry| entry.expect("an entry").path());
    let hash = |path: PathBuf| {
        let bytes = fs::read(&path).expect("a file");
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (name, blake3::hash(&bytes).to_hex().to_string())
    };
    let mut hashes: Vec<_> = files.map(hash).collect();
    hashes.sort();
    hashes
}

/// Returns all tensors of a checkpoint by name. The rows that sharded replicas store in separate files are
/// joined.
pub(crate) fn tensors(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let manifest = fs::read(checkpoint.join("manifest.json")).expect("a manifest");
    let manifest: Value = serde_json::from_slice(&manifest).expect("JSON");
    let mut parts: BTreeMap<String, BTreeMap<u32, Vec<u8>>> = BTreeMap::new();
    for shard in manifest["shards"].as_array().expect("a list") {
        // A part is written as `1/2`, the second of two.
        let part = shard["part"].as_str().and_then(|part| part.split('/').next()?.parse().ok()).unwrap_or(0);
        let bytes = fs::read(checkpoint.join(shard["name"].as_str().expect("a name"))).expect("a shard");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("a sound file");
        for (name, view) in file.tensors() {
            parts.entry(name).or_default().insert(part, view.data().to_vec());
        }
    }
    parts.into_iter().map(|(name, parts)| (name, parts.into_values().flatten().collect())).collect()
}

/// Sends a signal. No other program is started for it, because a run takes several steps until that has started.
pub(crate) fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("the process is ours");
}

/// Returns a seed, which is `PIPEWRIGHT_SEED` if that is set, and a generator of numbers from 0 to 1 with
/// that seed.
pub(crate) fn seeded() -> (u64, impl FnMut() -> f64) {
    let given = std::env::var("PIPEWRIGHT_SEED").ok().and_then(|seed| seed.parse().ok());
    let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |now| now.subsec_nanos().into());
    let seed: u64 = given.unwrap_or_else(clock);
    let mut state = seed;
    let random = move || {
        // SplitMix64 (Steele, Lea and Flood, 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    (seed, random)
}

/// Returns whether this process ignores SIGHUP, as `nohup` sets it, and says so. The runs that it starts do
/// the same.
pub(crate) fn ignores_hangup() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // The first bit stands for signal 1.
    let is_ignored = mask.is_some_and(|mask| mask & 1 == 1);
    if is_ignored {
        #[expect(clippy::print_stderr, reason = "a test that cannot run says so")]
        {
            eprintln!("skipped: the tests run under nohup, so no run ends at SIGHUP");
        }
    }
    is_ignored
}
