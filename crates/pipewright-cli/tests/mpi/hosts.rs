//! Tests of two machines with two ranks each. The machines are network namespaces of this machine, joined by
//! a virtual cable.
//!
//! Without network namespaces, the tests that are not ignored say so and pass, unless `PIPEWRIGHT_REQUIRE_NAMESPACES=1`.
//!
//! `mpirun` reaches the second machine through a remote shell that the test writes. The ranks communicate
//! only over TCP.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::{Folder, figures, folder, mpirun, pipewright, train_on_threads, with_overrides, words};

/// The addresses of the two hosts.
const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

/// Two namespaces and the cable between them. Both are deleted when the value is dropped.
pub(super) struct Hosts {
    /// The end of the names of the cable's ends.
    number: String,
    names: [String; 2],
}

impl Hosts {
    /// Makes the namespaces. `test` is a letter for each test. Returns `None` if namespaces are not allowed.
    pub(super) fn new(test: char) -> Option<Self> {
        let number = format!("{}{test}", std::process::id());
        let names = [format!("pwa{number}"), format!("pwb{number}")];
        let hosts = Self { names, number: number.clone() };
        let [a, b] = &hosts.names;
        let (cable_a, cable_b) = (format!("va{number}"), format!("vb{number}"));
        ip(&["netns", "add", a]).then_some(())?;
        let mut made = ip(&["netns", "add", b]);
        made &=
            ip(&["link", "add", &cable_a, "netns", a, "type", "veth", "peer", "name", &cable_b, "netns", b]);
        for (name, cable, address) in [(a, &cable_a, ADDRESSES[0]), (b, &cable_b, ADDRESSES[1])] {
            made &= ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", cable]);
            made &= ip(&["-n", name, "link", "set", "lo", "up"]);
            made &= ip(&["-n", name, "link", "set", cable, "up"]);
        }
        made.then_some(hosts)
    }

    /// Takes its address from the second host, so that nothing reaches it.
    pub(super) fn cut(&self) {
        assert!(ip(&["-n", &self.names[1], "addr", "flush", "dev", &format!("vb{}", self.number)]));
    }

    /// Gives the second host its address again.
    pub(super) fn mend(&self) {
        let (address, cable) = (format!("{}/24", ADDRESSES[1]), format!("vb{}", self.number));
        assert!(ip(&["-n", &self.names[1], "addr", "add", &address, "dev", &cable]));
    }

    /// Returns the numbers of the processes of the second host.
    pub(super) fn processes_of_second(&self) -> Vec<String> {
        processes_of(&self.names[1])
    }

    /// Returns the number of bytes that the first host has sent over the cable.
    fn sent_bytes(&self) -> u64 {
        let cable = format!("va{}", self.number);
        let file = format!("/sys/class/net/{cable}/statistics/tx_bytes");
        let output = Command::new("ip").args(["netns", "exec", &self.names[0], "cat", &file]).output();
        String::from_utf8_lossy(&output.expect("it ran before").stdout).trim().parse().unwrap_or(0)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // Processes of a host that was cut off have not noticed the end of the run.
            let _ = Command::new("kill").arg("-KILL").args(processes_of(name)).output();
            ip(&["netns", "del", name]);
        }
    }
}

/// Returns the numbers of the processes in a namespace.
pub(super) fn processes_of(namespace: &str) -> Vec<String> {
    let output = Command::new("ip").args(["netns", "pids", namespace]).output();
    let numbers = output.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&numbers).split_whitespace().map(str::to_owned).collect()
}

/// Says that a test cannot run without network namespaces. With `PIPEWRIGHT_REQUIRE_NAMESPACES=1`, it fails.
pub(super) fn skip() {
    let required = std::env::var("PIPEWRIGHT_REQUIRE_NAMESPACES").is_ok_and(|value| value == "1");
    assert!(!required, "network namespaces are not allowed here; they need root and iproute2");
    // The test harness hides what `eprintln!` prints of a test that passes.
    let _said = writeln!(
        std::io::stderr(),
        "SKIPPED: network namespaces are not allowed here; they need root and iproute2"
    );
}

pub(super) fn ip(arguments: &[&str]) -> bool {
    Command::new("ip").args(arguments).output().is_ok_and(|output| output.status.success())
}

/// Returns shell code that runs `command` on a host, with the host's own name and the arguments of the shell.
/// If there are [`Memories`], the host sees its own one.
fn on_host(namespace: &str, folder: &Path, command: &str) -> String {
    let memory = folder.join("memory").display().to_string();
    // Namespaces have mounts of their own.
    let mount =
        format!("if [ -d {memory}-{namespace} ]; then mount --bind {memory}-{namespace} {memory}; fi");
    format!(
        "exec ip netns exec {namespace} unshare --uts sh -c 'hostname {namespace}; {mount}; {command}' sh \"$@\""
    )
}

/// The memories of the two hosts, which both see as the folder `memory`. They are gone when this is dropped.
pub(super) struct Memories([Disk; 2]);

impl Memories {
    /// Mounts the memories below a folder, each with so many bytes. Returns `None` if that is not allowed.
    pub(super) fn mount(folder: &Path, hosts: &Hosts, bytes: usize) -> Option<Self> {
        fs::create_dir(folder.join("memory")).expect("the scratch folder takes folders");
        let [a, b] = &hosts.names;
        let mount = |name: &str| Disk::mount(folder.join(format!("memory-{name}")), bytes);
        Some(Self([mount(a)?, mount(b)?]))
    }

    /// Empties the memory of the second host, as if it was switched off.
    pub(super) fn lose_second(&self) {
        for entry in fs::read_dir(&self.0[1].0).expect("a folder").flatten() {
            // A process that is ending may still write.
            let _ = fs::remove_dir_all(entry.path());
        }
    }

    /// Returns whether both are empty.
    pub(super) fn are_empty(&self) -> bool {
        self.0.iter().all(|disk| fs::read_dir(&disk.0).expect("a folder").count() == 0)
    }
}

/// A file system in memory, until it is dropped.
pub(super) struct Disk(PathBuf);

impl Disk {
    /// Mounts it at a new folder. Returns `None` if that is not allowed.
    pub(super) fn mount(folder: PathBuf, bytes: usize) -> Option<Self> {
        fs::create_dir(&folder).expect("a new folder");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(&folder);
        mount.output().is_ok_and(|output| output.status.success()).then(|| Self(folder))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).output();
    }
}

/// Writes the script that `mpirun` calls to reach the second host. Its arguments are a host's name and a
/// command.
fn write_remote_shell(folder: &Path, namespace: &str) -> PathBuf {
    let (path, command) = (folder.join("shell"), on_host(namespace, folder, r#"exec sh -c "$*""#));
    fs::write(&path, format!("#!/bin/sh\nshift\n{command}\n")).expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its owner may");
    path
}

/// Writes the hostfile of both hosts.
fn write_hostfile(folder: &Path) -> PathBuf {
    let path = folder.join("hosts");
    fs::write(&path, ADDRESSES.map(|address| format!("{address} slots=2\n")).concat()).expect("a file");
    path
}

fn train(folder: &Path, hosts: &Hosts) -> Output {
    let shell = write_remote_shell(folder, &hosts.names[1]);
    let file = write_hostfile(folder);
    let mut command = mpirun(folder);
    let of_mpirun = std::mem::replace(&mut command, Command::new("sh"));
    command.current_dir(folder).args(["-c", &on_host(&hosts.names[0], folder, r#"exec "$@""#), "sh"]);
    command.envs(of_mpirun.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.args(["mpirun", "-n", "4", "--hostfile"]).arg(&file).args(["--mca", "plm_rsh_agent"]).arg(&shell);
    for network in ["btl_tcp_if_include", "oob_tcp_if_include"] {
        command.args(["--mca", network, "10.77.0.0/24"]);
    }
    command.args(["--mca", "btl", "tcp,self"]).arg(pipewright());
    with_overrides(&mut command, &["pipeline.ranks=4", "pipeline.transport=mpi"]);
    command.output().expect("sh is everywhere")
}

#[test]
fn two_hosts_train_as_one_does() {
    let Some(hosts) = Hosts::new('a') else { return skip() };
    let folder = folder();
    let expected = train_on_threads(folder.path(), &["pipeline.ranks=4"]);
    let output = train(folder.path(), &hosts);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
    assert_eq!(figures(folder.path()), expected);
    // The first host sends at least two steps x 8 microbatches x 8 x 16 numbers of four bytes.
    assert!(hosts.sent_bytes() > 2 * 8 * 8 * 16 * 4, "{} bytes crossed the cable", hosts.sent_bytes());
}

#[test]
#[ignore = "takes a minute, and needs root"]
fn a_launched_run_continues_on_the_host_that_answers() {
    let hosts = Hosts::new('b').expect("network namespaces need root and iproute2");
    let folder = folder();
    // On a busy machine, a process may be silent for three seconds.
    let set = ["pipeline.ranks=4", "run.steps=600", "run.checkpoint_every=2", "run.deadline_seconds=6"];
    let expected = undisturbed(folder.path(), &set);
    let mut command = launch_on(folder.path(), &hosts, &[], &set);
    let mut child = spawn_saying(&mut command, folder.path());
    super::launch::wait_for_step(folder.path(), 5);
    hosts.cut();
    let status = child.wait().expect("it ends");
    let said = said_in(folder.path());
    assert_eq!(status.code(), Some(0), "{said}");
    let change = "with 2 ranks instead of 4 (2 processes can run; 1f1b as configured, cut by `pipeline.partition`) \
                  (restart 1 of 3)";
    assert_eq!(said.matches(change).count(), 1, "{said}");
    assert_eq!(figures(folder.path()), expected, "{said}");
}

/// A run of four processes on two hosts. The second host is lost and comes back.
struct Disturbed {
    hosts: Hosts,
    folder: Folder,
    set: Vec<String>,
    child: Child,
}

impl Disturbed {
    /// Starts the run. `test` is a letter for each test.
    fn start(test: char, set: &[&str]) -> Self {
        let hosts = Hosts::new(test).expect("network namespaces need root and iproute2");
        let folder = folder();
        let own = ["pipeline.ranks=4", "run.checkpoint_every=20", "run.timelines=0"];
        let set = [&own, set].concat();
        // On a busy machine, a process may be silent for three seconds.
        let disturbed = ["run.steps=200000", "run.deadline_seconds=6"];
        let mut command = launch_on(folder.path(), &hosts, &[], &[&set[..], &disturbed].concat());
        let child = spawn_saying(&mut command, folder.path());
        super::launch::wait_for_step(folder.path(), 5);
        Self { hosts, folder, set: set.into_iter().map(str::to_owned).collect(), child }
    }

    fn said(&self) -> String {
        said_in(self.folder.path())
    }

    /// Returns the events of this name in the metrics, each with the number of lines behind it.
    fn events(&self, name: &str) -> Vec<(serde_json::Value, usize)> {
        let metrics = fs::read_to_string(self.folder.path().join("out/metrics.jsonl")).unwrap_or_default();
        let lines: Vec<serde_json::Value> =
            metrics.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let count = lines.len();
        let events = lines.into_iter().enumerate().filter(|(_, line)| line["event"] == name);
        events.map(|(at, line)| (line, count - at - 1)).collect()
    }

    /// Waits for the event of this name and number, from 1, and for some steps after it.
    fn wait_for(&self, name: &str, number: usize) -> serde_json::Value {
        let start = Instant::now();
        loop {
            if let Some((event, _)) = self.events(name).get(number - 1).filter(|(_, behind)| *behind > 3) {
                return event.clone();
            }
            assert!(start.elapsed() < Duration::from_secs(120), "no {name} {number}: {}", self.said());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Cuts the second host off, waits for restart `number`, and mends the cable.
    fn lose_second(&self, number: usize) -> serde_json::Value {
        self.hosts.cut();
        let restart = self.wait_for("restart", number);
        self.hosts.mend();
        let cut_off = self.hosts.processes_of_second();
        Command::new("kill").arg("-KILL").args(cut_off).output().expect("kill is everywhere");
        restart
    }

    /// Ends the run. Checks that it has the figures of an undisturbed one, and returns what it has said.
    fn end(mut self) -> String {
        super::signal(self.child.id(), "TERM");
        let status = self.child.wait().expect("it ends");
        let (said, path) = (self.said(), self.folder.path());
        assert_eq!(status.code(), Some(5), "{said}");
        assert!(!path.join("out/growth.json").exists() && !path.join("out/restart.json").exists());
        let (found, alone) = (figures(path), folder());
        let steps = format!("run.steps={}", found.len());
        let set: Vec<&str> = self.set.iter().map(String::as_str).chain([&*steps]).collect();
        assert_eq!(found, undisturbed(alone.path(), &set), "{said}");
        said
    }
}

/// Checks that a run whose second host is lost grows again when that host answers. `change` is how it
/// continues on the first host.
fn check_growth(test: char, set: &[&str], change: &str) {
    let run = Disturbed::start(test, set);
    let restart = run.lose_second(1);
    let growth = run.wait_for("growth", 1);
    assert!(growth["step"].as_u64() >= restart["step"].as_u64(), "{growth}: {}", run.said());
    assert_eq!(growth["change"], "with 4 ranks instead of 2", "{}", run.said());
    let said = run.end();
    let sentence = format!(
        "the host 10.77.0.2 answers; the run continues from step {}, with 4 ranks instead of 2\n",
        growth["step"]
    );
    for expected in [&sentence, change] {
        assert_eq!(said.matches(expected).count(), 1, "`{expected}` in: {said}");
    }
}

#[test]
#[ignore = "takes a minute, and needs root"]
fn a_launched_run_grows_again_when_its_host_answers() {
    check_growth('g', &[], "with 2 ranks instead of 4 (2 processes can run; 1f1b as configured");
}

#[test]
#[ignore = "takes a minute, and needs root"]
fn a_run_with_a_plan_is_planned_again_and_grows_back_to_its_plan() {
    let set = ["pipeline.partition=explicit", "pipeline.boundaries=[1,2,3]"];
    check_growth('h', &set, "with 2 ranks instead of 4 (2 processes can run; planned: ");
}

#[test]
#[ignore = "takes three minutes, and needs root"]
fn a_run_does_not_grow_at_once_onto_a_host_that_it_has_lost_twice() {
    let run = Disturbed::start('i', &[]);
    run.lose_second(1);
    run.wait_for("growth", 1);
    run.lose_second(2);
    // The host is asked after six seconds if it is not left out.
    std::thread::sleep(Duration::from_secs(15));
    assert_eq!(run.events("growth").len(), 1, "{}", run.said());
    run.wait_for("growth", 2);
    run.end();
}

#[test]
#[ignore = "takes half a minute, and needs root"]
fn a_lost_host_costs_at_most_two_steps_with_the_copy_of_its_neighbour() {
    let hosts = Hosts::new('d').expect("network namespaces need root and iproute2");
    let folder = folder();
    let path = folder.path().canonicalize().expect("it exists");
    // On a busy machine, a process may be silent for three seconds.
    let set = ["pipeline.ranks=4", "run.steps=600", "run.checkpoint_every=0", "run.deadline_seconds=6"];
    let expected = undisturbed(&path, &set);
    let memories = Memories::mount(&path, &hosts, 64 << 20).expect("mounting a file system needs root");
    let copies = ["run.copy_every=1", "run.copies=neighbour", "run.copy_folder=memory"];
    let mut command = launch_on(&path, &hosts, &[], &[&set[..], &copies].concat());
    let mut child = spawn_saying(&mut command, &path);
    super::launch::wait_for_step(&path, 9);
    let _ = Command::new("kill").arg("-KILL").args(hosts.processes_of_second()).status();
    memories.lose_second();
    let status = child.wait().expect("it ends");
    let said = said_in(&path);
    assert_eq!(status.code(), Some(0), "{said}");
    let [restart] = &super::restarts(&path)[..] else { panic!("one restart: {said}") };
    assert_eq!(restart["state"], "neighbour", "{said}");
    let step = |key: &str| restart[key].as_u64().expect("a step");
    assert!(step("failed_step") - step("step") <= 3, "{restart}: {said}");
    assert!(step("state_bytes") > 0 && said.contains("in part on the host after the one"), "{said}");
    assert_eq!(figures(&path), expected, "{said}");
    assert!(memories.are_empty(), "a run that ends well leaves no copies");
}

#[test]
#[ignore = "takes a quarter of a minute, and needs root"]
fn the_host_of_a_slow_rank_is_replaced() {
    let hosts = Hosts::new('c').expect("network namespaces need root and iproute2");
    let folder = folder();
    let set = ["pipeline.ranks=2", "pipeline.microbatches=2", "run.steps=24", "run.replace_slow=true"];
    let expected = undisturbed(folder.path(), &set);
    let mut command = launch_on(folder.path(), &hosts, &[], &set);
    let output = command.env("PIPEWRIGHT_FAULT", "slow:1:7:100").output().expect("sh is everywhere");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let sentence = "its host 10.77.0.1 becomes a spare host; the run continues from step ";
    assert_eq!(said.matches(sentence).count(), 1, "{said}");
    assert!(!said.contains("stopped by a signal"), "{said}");
    assert_eq!(figures(folder.path()), expected, "{said}");
    assert!(!folder.path().join("out/slow-rank.json").exists());
}

/// Returns the figures of a run on threads, and removes its results.
fn undisturbed(folder: &Path, set: &[&str]) -> Vec<[String; 5]> {
    let expected = train_on_threads(folder, set);
    fs::remove_dir_all(folder.join("out")).expect("the results");
    expected
}

/// Starts `launch`, which writes its words into the file `said` of the folder: processes of a host that is cut off
/// stay, and would keep a pipe open.
pub(super) fn spawn_saying(command: &mut Command, folder: &Path) -> Child {
    let said = fs::File::create(folder.join("said")).expect("the scratch folder takes files");
    command.stdout(Stdio::null()).stderr(said).spawn().expect("sh is everywhere")
}

/// Returns the words of `launch` so far.
pub(super) fn said_in(folder: &Path) -> String {
    fs::read_to_string(folder.join("said")).expect("text")
}

/// Returns `launch` on the first host, with both hosts in its hostfile, and with further options.
pub(super) fn launch_on(folder: &Path, hosts: &Hosts, options: &[&str], set: &[&str]) -> Command {
    let shell = write_remote_shell(folder, &hosts.names[1]);
    write_hostfile(folder);
    let mut command = Command::new("sh");
    command.current_dir(folder).args(["-c", &on_host(&hosts.names[0], folder, r#"exec "$@""#), "sh"]);
    command.env("OMPI_MCA_orte_tmpdir_base", folder).env("OMPI_MCA_plm_rsh_agent", &shell);
    for network in ["btl_tcp_if_include", "oob_tcp_if_include"] {
        command.env(format!("OMPI_MCA_{network}"), "10.77.0.0/24");
    }
    command.env("OMPI_MCA_btl", "tcp,self").arg(pipewright()).args(["launch", "--hosts", "hosts"]);
    command.args(options).arg("--");
    with_overrides(&mut command, set);
    command
}
