//! A trial of `launch` with Slurm itself: a cluster whose nodes are daemons of this machine, each with its
//! own host name and `/dev/shm`.

use std::env;
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::launch::{refuse_part, wait_for_step};
use super::slurm::undisturbed;
use super::{Folder, figures, folder, pipewright, restarts, signal};

const NODES: [&str; 3] = ["n1", "n2", "n3"];

/// The settings of the runs: four processes fill two of the three nodes.
const SETTINGS: [&str; 5] = [
    "run.steps=40",
    "run.checkpoint_every=2",
    "run.deadline_seconds=5",
    "pipeline.ranks=4",
    "model.num_hidden_layers=4",
];

/// Gives the processes on the node `WRONG` the fault `FAULT`.
const PROLOG: &str = r#"#!/bin/sh
[ -z "$WRONG" ] || [ "$SLURMD_NODENAME" != "$WRONG" ] || echo "export PIPEWRIGHT_FAULT=$FAULT"
"#;

/// The daemons of a cluster, and the folder of the run. They are ended when the value is dropped.
struct Cluster {
    folder: Folder,
    /// `munged` and `slurmctld`.
    daemons: Vec<Child>,
    /// `slurmd` of each node.
    nodes: Vec<Child>,
}

impl Cluster {
    /// Starts the daemons, and waits until all nodes are idle.
    fn start() -> Self {
        let folder = folder();
        let mut cluster = Self { folder, daemons: Vec::new(), nodes: Vec::new() };
        fs::create_dir(cluster.path("slurm")).expect("a new folder");
        for name in ["state", "n1", "n2", "n3", "tmp-n1", "tmp-n2", "tmp-n3"] {
            fs::create_dir(cluster.path("slurm").join(name)).expect("a new folder");
        }
        // `munged` refuses a socket or a log that other users may replace.
        fs::set_permissions(cluster.folder.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
        fs::write(cluster.path("slurm/key"), [7; 1024]).expect("a file");
        fs::set_permissions(cluster.path("slurm/key"), fs::Permissions::from_mode(0o400)).expect("ours");
        fs::write(cluster.path("slurm/prolog"), PROLOG).expect("a file");
        fs::set_permissions(cluster.path("slurm/prolog"), fs::Permissions::from_mode(0o755)).expect("ours");
        fs::write(cluster.path("slurm/slurm.conf"), cluster.configuration()).expect("a file");
        let mut munged = Command::new("munged");
        munged.args(["--foreground", "--force"]);
        for (option, name) in
            [("key-file", "key"), ("socket", "socket"), ("pid-file", "munged.pid"), ("seed-file", "seed")]
        {
            munged.arg(format!("--{option}={}", cluster.path("slurm").join(name).display()));
        }
        cluster.daemon(munged);
        let socket = cluster.path("slurm/socket");
        wait_for("the socket of munged", || socket.exists());
        let mut controller = cluster.command("slurmctld");
        controller.arg("-D");
        cluster.daemon(controller);
        for name in NODES {
            let node = cluster.start_node(name);
            cluster.nodes.push(node);
        }
        cluster.wait_until_idle();
        cluster
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn configuration(&self) -> String {
        let name = fs::read_to_string("/proc/sys/kernel/hostname").expect("Linux");
        let (name, at) = (name.trim(), self.path("slurm").display().to_string());
        let listeners = [(); 4].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let [own, ports @ ..] = listeners.map(|port| port.local_addr().expect("it is bound").port());
        let nodes = NODES.iter().zip(ports).map(|(node, port)| {
            format!("NodeName={node} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=2\n")
        });
        format!(
            "ClusterName=trial\nSlurmctldHost={name}(127.0.0.1)\nSlurmctldPort={own}\nSlurmUser=root\nSlurmdUser=root\n\
             AuthType=auth/munge\nAuthInfo=socket={at}/socket\nStateSaveLocation={at}/state\nSlurmdSpoolDir={at}/%n\n\
             TmpFS={at}/tmp-%n\nSlurmctldPidFile={at}/slurmctld.pid\nSlurmdPidFile={at}/%n.pid\n\
             SlurmctldLogFile={at}/slurmctld.log\nSlurmdLogFile={at}/%n.log\nTaskProlog={at}/prolog\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nSlurmdParameters=config_overrides\n\
             SchedulerParameters=permit_job_expansion\n\
             ReturnToService=2\nSlurmdTimeout=10\nKillWait=5\n{}PartitionName=main Nodes=ALL Default=YES State=UP\n",
            nodes.collect::<String>()
        )
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.path("slurm/slurm.conf")).current_dir(self.folder.path());
        command
    }

    fn daemon(&mut self, mut command: Command) {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let name = command.get_program().to_string_lossy().into_owned();
        self.daemons.push(command.spawn().unwrap_or_else(|error| panic!("{name}: {error}: install Slurm")));
    }

    fn start_node(&self, name: &str) -> Child {
        let mut node = self.command("unshare");
        let start = format!(
            "hostname {name} && mount -t tmpfs tmpfs /dev/shm && exec slurmd -D -f \"$SLURM_CONF\" -N {name}"
        );
        node.args(["--mount", "--uts", "sh", "-c", &start]);
        node.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        node.spawn().expect("util-linux is everywhere")
    }

    /// Returns the state of each node, a node in each line.
    fn states(&self) -> String {
        let output = self.command("sinfo").args(["--noheader", "-N", "-o", "%N %T"]).output();
        String::from_utf8_lossy(&output.expect("Slurm has sinfo").stdout).into_owned()
    }

    fn wait_until_idle(&self) {
        wait_for("three idle nodes", || self.states().matches(" idle\n").count() == 3);
    }

    fn said(&self) -> String {
        fs::read_to_string(self.path("said")).unwrap_or_default()
    }

    /// Waits for an event in the metrics, and for some steps after it.
    fn wait_for_event(&self, name: &str) -> Value {
        let since = Instant::now();
        loop {
            let metrics = fs::read_to_string(self.path("out/metrics.jsonl")).unwrap_or_default();
            let lines = metrics.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let mut lines = lines.skip_while(|line| line["event"] != name);
            if let (Some(event), Some(_)) = (lines.next(), lines.nth(2)) {
                return event;
            }
            assert!(since.elapsed() < Duration::from_secs(120), "no {name}: {}", self.said());
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Starts `salloc` for all nodes with `launch` and the words after it. Its words go to the file `said`.
    fn launch(&self, words: &[&str], (wrong, fault): (&str, &str)) -> Child {
        let said = File::create(self.path("said")).expect("a file");
        let mut command = self.command("salloc");
        command
            .args(["--no-kill", "--nodes=3", "--ntasks-per-node=2"])
            .arg(pipewright())
            .args(["launch", "--"]);
        command.args(words).env("WRONG", wrong).env("FAULT", fault);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
        command.spawn().expect("Slurm has salloc")
    }

    /// Returns the numbers of the processes of the run on a node, without a node those outside of the
    /// cluster.
    fn processes_on(&self, node: Option<&str>) -> Vec<String> {
        let variable = node.map(|node| format!("SLURMD_NODENAME={node}"));
        let own = pipewright().canonicalize().expect("it is built");
        let mut numbers = processes();
        numbers.retain(|number| {
            let process = Path::new("/proc").join(number);
            let variables = fs::read(process.join("environ")).unwrap_or_default();
            let mut variables = variables.split(|byte| *byte == 0);
            let is_there = match &variable {
                Some(variable) => variables.any(|one| one == variable.as_bytes()),
                None => !variables.any(|one| one.starts_with(b"SLURMD_NODENAME=")),
            };
            is_there
                && fs::read_link(process.join("exe")).is_ok_and(|program| program == own)
                && fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == self.folder.path())
        });
        numbers
    }

    /// Kills the daemon of a node and all its processes at the same time.
    fn lose(&mut self, node: usize) {
        let namespace = |number: &str| fs::read_link(format!("/proc/{number}/ns/mnt")).ok();
        let own = namespace(&self.nodes[node].id().to_string());
        let mut numbers = processes();
        numbers.retain(|number| own.is_some() && namespace(number) == own);
        // Processes that have ended meanwhile are an error of `kill`.
        let _ = Command::new("kill").arg("-KILL").args(numbers).output();
        let _ = self.nodes[node].wait();
    }

    /// Runs with a disturbance after step 9, and checks that the run ends with the bits of threads after so
    /// many restarts.
    fn check(
        &mut self,
        what: &str,
        (wrong, set): ((&str, &str), &[&str]),
        expected: usize,
        disturb: impl FnOnce(&mut Self),
    ) {
        let since = Instant::now();
        let _ = fs::remove_dir_all(self.path("out"));
        let set = [&SETTINGS[..], set].concat();
        let words = ["train", "small.toml"].into_iter().chain(set.iter().flat_map(|set| ["--set", *set]));
        let mut run = self.launch(&words.collect::<Vec<_>>(), wrong);
        wait_for_step(self.folder.path(), 9);
        disturb(self);
        let status = run.wait().expect("it ends");
        let said = fs::read_to_string(self.path("said")).expect("text");
        assert_eq!(status.code(), Some(0), "{what}: {said}");
        assert!(figures(self.folder.path()) == undisturbed(&SETTINGS), "{what}: other bits: {said}");
        let restarts = restarts(self.folder.path());
        assert_eq!(restarts.len(), expected, "{what}: {said}");
        say(&format!("{what}: {} s, restarts: {restarts:?}", since.elapsed().as_secs()));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in 0..self.nodes.len() {
            self.lose(node);
        }
        for daemon in &mut self.daemons {
            // It may have ended.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// Returns the numbers of all processes.
fn processes() -> Vec<String> {
    let entries = fs::read_dir("/proc").expect("Linux").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).collect()
}

fn wait_for(what: &str, is_there: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_there() {
        assert!(since.elapsed() < Duration::from_secs(60), "{what}: not there after a minute");
        thread::sleep(Duration::from_millis(100));
    }
}

#[expect(clippy::print_stderr, reason = "what happened in the trial is its result")]
fn say(sentence: &str) {
    eprintln!("{sentence}");
}

fn kill(numbers: &[String], name: &str) {
    for number in numbers {
        signal(number.parse().expect("a number"), name);
    }
}

#[test]
#[ignore = "takes minutes, and needs root and Slurm"]
fn runs_in_an_allocation_survive_faults() {
    assert!(env::var_os("SLURM_JOB_ID").is_none(), "the trial makes allocations of its own");
    let mut cluster = Cluster::start();
    let on = |cluster: &Cluster| cluster.processes_on(Some("n2"));
    let none = (("", ""), &[][..]);
    cluster.check("undisturbed", none, 0, |cluster| assert_eq!(on(cluster).len(), 2, "processes on n2"));
    cluster.check("a process is killed", none, 1, |cluster| kill(&on(cluster)[..1], "KILL"));
    cluster.check("a process is stopped", none, 1, |cluster| kill(&on(cluster)[..1], "STOP"));
    cluster.check("all processes of a node are killed", none, 1, |cluster| kill(&on(cluster), "KILL"));
    let copies = ["run.checkpoint_every=0", "run.copy_every=1", "run.copies=neighbour"];
    cluster.check("a node is lost", (("", ""), &copies), 1, |cluster| cluster.lose(1));
    assert_eq!(restarts(cluster.folder.path())[0]["state"], "neighbour");
    cluster.nodes[1] = cluster.start_node(NODES[1]);
    cluster.wait_until_idle();
    let verified = [&copies[..], &["run.verify=on-suspicion", "run.replace_wrong=true"]].concat();
    let wrong = ("n2", "flip:3:10");
    cluster.check("a node computes wrong bits", (wrong, &verified), 1, |_| ());
    let said = fs::read_to_string(cluster.path("said")).expect("text");
    assert!(said.contains("(on n2); its host n2 is left out; the run continues from step "), "{said}");
    check_signal(&cluster, "to the launch", || kill(&cluster.processes_on(None), "TERM"));
    check_signal(&cluster, "to the job", || {
        let output = cluster.command("scancel").args(["--signal=TERM", "--user=root"]).output();
        assert!(output.expect("Slurm has scancel").status.success());
    });
}

/// Slurm takes a lost node from the allocation, and does not give it back by itself when it is free again.
#[test]
#[ignore = "takes a minute, and needs root and Slurm"]
fn a_run_grows_again_onto_a_node_that_comes_back() {
    let mut cluster = Cluster::start();
    let set = ["pipeline.ranks=6", "model.num_hidden_layers=6", "run.checkpoint_every=20", "run.timelines=0"];
    let all = [&set[..], &["run.steps=200000", "run.deadline_seconds=5"]].concat();
    let words = ["train", "small.toml"].into_iter().chain(all.iter().flat_map(|set| ["--set", *set]));
    let mut run = cluster.launch(&words.collect::<Vec<_>>(), ("", ""));
    wait_for_step(cluster.folder.path(), 5);
    cluster.lose(1);
    cluster.wait_for_event("restart");
    wait_for("n2 down", || cluster.states().contains("n2 down"));
    cluster.nodes[1] = cluster.start_node(NODES[1]);
    let growth = cluster.wait_for_event("growth");
    assert_eq!(growth["change"], "with 6 ranks instead of 4", "{}", cluster.said());
    assert_eq!(cluster.processes_on(Some("n2")).len(), 2, "{}", cluster.said());
    kill(&cluster.processes_on(None), "TERM");
    assert_eq!(run.wait().expect("it ends").code(), Some(5), "{}", cluster.said());
    let found = figures(cluster.folder.path());
    let steps = format!("run.steps={}", found.len());
    assert!(found == undisturbed(&[&set[..], &[&*steps]].concat()), "other bits: {}", cluster.said());
    say(&format!("a node comes back: {growth}"));
}

/// Slurm's launcher ends the processes when the first one ends, and takes the greatest of their exit codes.
#[test]
#[ignore = "takes half a minute, and needs root and Slurm"]
fn a_mistake_that_the_processes_find_is_not_a_fault() {
    let cluster = Cluster::start();
    let set = SETTINGS.iter().chain(&["data.path=none.txt"]).flat_map(|set| ["--set", *set]);
    let words: Vec<&str> = ["train", "small.toml"].into_iter().chain(set).collect();
    let code = cluster.launch(&words, ("", "")).wait().expect("it ends").code();
    let said = fs::read_to_string(cluster.path("said")).expect("text");
    assert_eq!(code, Some(2), "{said}");
    assert_eq!(said.matches("none.txt: there is no such data file").count(), 1, "{said}");
    // Only one process finds this one, while it trains.
    let set = SETTINGS.iter().chain(&["run.steps=3000", "run.checkpoint_every=20"]);
    let words = ["train", "small.toml"].into_iter().chain(set.flat_map(|set| ["--set", *set]));
    let mut run = cluster.launch(&words.collect::<Vec<_>>(), ("", ""));
    wait_for_step(cluster.folder.path(), 2);
    let part = refuse_part(cluster.folder.path());
    let code = run.wait().expect("it ends").code();
    assert_eq!(code, Some(2), "{}", cluster.said());
    assert!(cluster.said().contains(&part), "{}", cluster.said());
    assert!(restarts(cluster.folder.path()).is_empty(), "{}", cluster.said());
}

/// Checks that a run saves a checkpoint and ends after a signal, and resumes from it.
fn check_signal(cluster: &Cluster, what: &str, send: impl Fn()) {
    fs::remove_dir_all(cluster.path("out")).expect("the results");
    let set = SETTINGS.iter().flat_map(|set| ["--set", *set]);
    let words: Vec<&str> = ["train", "small.toml"].into_iter().chain(set).collect();
    let mut run = cluster.launch(&words, ("", ""));
    wait_for_step(cluster.folder.path(), 9);
    send();
    let code = |run: &mut Child| run.wait().expect("it ends").code();
    let said = || fs::read_to_string(cluster.path("said")).expect("text");
    assert_eq!(code(&mut run), Some(5), "{what}: {}", said());
    let steps = figures(cluster.folder.path()).len();
    assert!((9..40).contains(&steps), "{steps} steps: {}", said());
    assert_eq!(code(&mut cluster.launch(&["resume", "out"], ("", ""))), Some(0), "{}", said());
    assert!(figures(cluster.folder.path()) == undisturbed(&SETTINGS), "other bits: {}", said());
    assert!(restarts(cluster.folder.path()).is_empty(), "{what}: it has resumed only by command: {}", said());
    say(&format!("SIGTERM {what} after step {steps}, and resumed"));
}
