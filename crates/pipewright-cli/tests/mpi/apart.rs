//! Tests of machines that share no folder. Each is a network namespace of this machine with its own home folder. The second
//! and the third see neither the scratch folder of the test, with the configuration and the data, nor the program.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::hosts::{Disk, ip, processes_of, said_in, skip, spawn_saying};
use super::{Folder, figures, figures_of, folder, pipewright, train_on_threads, words};

/// The addresses of the machines.
const ADDRESSES: [&str; 3] = ["10.78.0.1", "10.78.0.2", "10.78.0.3"];

/// Three machines in one network.
struct Machines {
    names: [String; 3],
    /// The namespace with the switch between them.
    switch: String,
    /// The home folders, in a folder that the machines see.
    homes: TempDir,
    folder: Folder,
}

impl Machines {
    /// Makes the machines. `test` is a letter for each test. Returns `None` if namespaces are not allowed.
    fn new(test: char) -> Option<Self> {
        let number = format!("{}{test}", std::process::id());
        let names = ["a", "b", "c"].map(|letter| format!("pa{letter}{number}"));
        let homes = tempfile::tempdir().expect("a scratch folder");
        let machines = Self { names, switch: format!("pas{number}"), homes, folder: folder() };
        let switch = &machines.switch;
        let mut made = ip(&["netns", "add", switch]);
        made.then_some(())?;
        made &= ip(&["-n", switch, "link", "add", "switch", "type", "bridge"]);
        made &= ip(&["-n", switch, "link", "set", "switch", "up"]);
        for (name, address) in machines.names.iter().zip(ADDRESSES) {
            let end = format!("s{}", &name[2..]);
            made &= ip(&["netns", "add", name]);
            made &= ip(&[
                "link", "add", "net", "netns", name, "type", "veth", "peer", "name", &end, "netns", switch,
            ]);
            made &= ip(&["-n", switch, "link", "set", &end, "master", "switch", "up"]);
            made &= ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", "net"]);
            made &= ip(&["-n", name, "link", "set", "lo", "up"]);
            made &= ip(&["-n", name, "link", "set", "net", "up"]);
            fs::create_dir(machines.homes.path().join(name)).expect("a folder");
        }
        machines.write_shell("");
        made.then_some(machines)
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn home(&self, machine: usize) -> PathBuf {
        self.homes.path().join(&self.names[machine])
    }

    /// Writes the program that takes the place of `ssh`. It runs `before` on the machine first.
    fn write_shell(&self, before: &str) {
        let hidden = [self.path(), pipewright().parent().expect("a folder")];
        let hide = hidden.map(|folder| format!("mount -t tmpfs tmpfs {};", folder.display())).concat();
        let mut text = "#!/bin/sh\nhost=$1\nshift\ncase $host in\n".to_owned();
        for (machine, address) in ADDRESSES.iter().enumerate().skip(1) {
            let (name, home) = (&self.names[machine], self.home(machine).display().to_string());
            text += &format!(
                "{address}) exec ip netns exec {name} unshare --uts --mount sh -c 'hostname {name}; {hide} cd {home}; \
                 export HOME={home}; {before} exec sh -c \"$*\"' sh \"$@\" ;;\n"
            );
        }
        text +=
            "esac\necho \"ssh: Could not resolve hostname $host: Name or service not known\" >&2\nexit 255\n";
        fs::write(self.shell(), text).expect("the scratch folder takes files");
        fs::set_permissions(self.shell(), fs::Permissions::from_mode(0o755)).expect("its owner may");
    }

    /// Returns the path of that program. The daemons of `mpirun` on all machines look for it.
    fn shell(&self) -> PathBuf {
        self.homes.path().join("ssh-of-test")
    }

    /// Returns `launch` on the first machine, with the three machines as its hosts.
    fn launch(&self, slots: [u32; 3], words: &[&str], set: &[&str]) -> Command {
        let hosts = ADDRESSES.iter().zip(slots).filter(|(_, slots)| *slots > 0);
        let hosts: Vec<String> = hosts.map(|(address, slots)| format!("{address}:{slots}")).collect();
        let mut command = self.launch_on(&hosts.join(","));
        command.arg("--").args(words).args(set.iter().flat_map(|set| ["--set", set]));
        command
    }

    /// Returns `launch` on the first machine, with these hosts.
    fn launch_on(&self, hosts: &str) -> Command {
        let mut command = Command::new("ip");
        command.current_dir(self.path()).args(["netns", "exec", &self.names[0]]);
        command.args([
            "unshare",
            "--uts",
            "sh",
            "-c",
            &format!("hostname {}; exec \"$@\"", self.names[0]),
            "sh",
        ]);
        command.env("HOME", self.home(0)).env("OMPI_MCA_plm_rsh_agent", self.shell());
        command.env("OMPI_MCA_orte_tmpdir_base", self.path()).env("OMPI_MCA_btl", "tcp,self");
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        for network in ["btl_tcp_if_include", "oob_tcp_if_include"] {
            command.env(format!("OMPI_MCA_{network}"), "10.78.0.0/24");
        }
        command.arg(pipewright()).args(["launch", "--hosts", hosts]);
        command
    }

    /// Copies the program to the second machine, then limits the bytes that it sends to 5 Mbit/s. The copy would take long
    /// on this link.
    fn copy_program_and_slow_down(&self) {
        let set = ["pipeline.ranks=2", "run.steps=1", "run.out=before"];
        let output = self.launch([1, 1, 0], &["train", "small.toml"], &set).output();
        require_success(&output.expect("ip is installed"));
        let mut slow = Command::new("tc");
        slow.args(["-n", &self.names[1], "qdisc", "add", "dev", "net", "root", "tbf"]);
        slow.args(["rate", "5mbit", "burst", "16kb", "latency", "200ms"]);
        assert!(slow.output().is_ok_and(|output| output.status.success()), "this kernel limits no rates");
    }

    /// Returns the builds that a machine has.
    fn builds(&self, machine: usize) -> usize {
        let builds =
            fs::read_dir(self.home(machine).join(".cache/pipewright")).into_iter().flatten().flatten();
        builds.filter(|build| build.path().join("pipewright").is_file()).count()
    }

    /// Returns the files that processes have left on a machine.
    fn left(&self, machine: usize) -> usize {
        fs::read_dir(self.home(machine).join(".cache/pipewright/runs")).map_or(0, Iterator::count)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in self.names.iter().chain([&self.switch]) {
            let _ = Command::new("kill").arg("-KILL").args(processes_of(name)).output();
            ip(&["netns", "del", name]);
        }
    }
}

/// Returns the machines; `None`, with a word about it, if namespaces are not allowed.
fn machines(test: char) -> Option<Machines> {
    let machines = Machines::new(test);
    if machines.is_none() {
        skip();
    }
    machines
}

/// Returns the bytes of the files of tensors of a checkpoint.
fn tensors(folder: &Path, step: u32) -> Vec<Vec<u8>> {
    let checkpoint = folder.join(format!("checkpoints/step-{step:08}"));
    let entries = fs::read_dir(&checkpoint).expect("the checkpoint is complete").flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|ending| ending == "safetensors"));
    files.sort();
    files.iter().map(|file| fs::read(file).expect("a file")).collect()
}

fn require_success(output: &Output) {
    assert_eq!(output.status.code(), Some(0), "{}", words(output));
}

/// Returns the results of threads, which are moved to `expected`.
fn on_threads(folder: &Path, set: &[&str]) -> Vec<[String; 5]> {
    let found = train_on_threads(folder, set);
    fs::rename(folder.join("out"), folder.join("expected")).expect("the results");
    found
}

#[test]
fn machines_without_a_shared_folder_train_resume_and_leave_nothing() {
    let Some(machines) = machines('a') else { return };
    let path = machines.path();
    fs::write(path.join("v.txt"), "a fox is not a dog and a dog is not a fox ".repeat(8)).expect("a file");
    let set = ["pipeline.ranks=4", "data.validation=v.txt", "run.eval_every=2", "run.checkpoint_every=2"];
    let expected = on_threads(path, &[&set[..], &["run.steps=6"]].concat());

    let train = ["train", "small.toml"];
    let output = machines.launch([2, 1, 1], &train, &[&set[..], &["run.steps=4"]].concat()).output();
    let output = output.expect("ip is installed");
    require_success(&output);
    let said = words(&output);
    assert_eq!(said.matches("this program is copied to the host").count(), 2, "{said}");
    assert_eq!(figures(path), expected[..4], "{said}");
    assert_eq!(tensors(&path.join("out"), 4), tensors(&path.join("expected"), 4));

    let resume = ["resume", "out"];
    let output = machines.launch([2, 1, 1], &resume, &["run.steps=6"]).output().expect("ip is installed");
    require_success(&output);
    let said = words(&output);
    assert!(said.contains("resuming from step 4") && !said.contains("is copied"), "{said}");
    assert_eq!(figures(path), expected, "{said}");
    assert_eq!(tensors(&path.join("out"), 6), tensors(&path.join("expected"), 6));
    assert_eq!([1, 2].map(|machine| (machines.builds(machine), machines.left(machine))), [(1, 0), (1, 0)]);
}

/// Writes a model, and a configuration that trains it.
fn write_model(path: &Path) {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-models/tests/data/qwen3-tiny");
    fs::create_dir(path.join("model")).expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(tiny.join(file), path.join("model").join(file)).expect(file);
    }
    let config = "[model]\nfrom = \"model\"\n[data]\npath = \"text.txt\"\nseq_len = 8\ntokenizer = \"bytes\"\n\
                  [pipeline]\nmicrobatches = 4\n[run]\nsteps = 2\nout = \"out\"\n";
    fs::write(path.join("small.toml"), config).expect("a configuration");
}

#[test]
fn the_weights_of_a_model_go_to_the_machines_of_their_stages() {
    let Some(machines) = machines('b') else { return };
    let path = machines.path();
    write_model(path);
    for adapter in [&[][..], &["adapter.kind=lora"]] {
        let set = [&["pipeline.ranks=2"], adapter].concat();
        let expected = on_threads(path, &set);
        let output =
            machines.launch([1, 1, 0], &["train", "small.toml"], &set).output().expect("ip is installed");
        require_success(&output);
        assert_eq!(figures(path), expected);
        assert_eq!(tensors(&path.join("out"), 2), tensors(&path.join("expected"), 2), "{adapter:?}");
        // Adapters need the parameters of the base again.
        let set = ["run.steps=3"];
        require_success(
            &machines.launch([1, 1, 0], &["resume", "out"], &set).output().expect("ip is installed"),
        );
        assert_eq!(figures_of(&path.join("out")).len(), 3);
        for folder in ["out", "expected"] {
            fs::remove_dir_all(path.join(folder)).expect("the results");
        }
    }
}

#[test]
#[ignore = "takes half a minute, and needs root"]
fn a_run_continues_after_a_process_of_another_machine_was_killed() {
    let machines = Machines::new('c').expect("network namespaces need root and iproute2");
    let path = machines.path();
    let set = ["pipeline.ranks=4", "run.steps=60", "run.deadline_seconds=6"];
    let expected = on_threads(path, &set);
    // The state is in a checkpoint on the first machine, or in the memory of each.
    for (saves, state) in [("run.checkpoint_every=4", "null"), ("run.copy_every=1", "\"memory\"")] {
        let set = [&set[..], &[saves]].concat();
        let mut child = spawn_saying(&mut machines.launch([2, 1, 1], &["train", "small.toml"], &set), path);
        super::launch::wait_for_step(path, 9);
        let killed = Command::new("kill").arg("-KILL").args(processes_of(&machines.names[1])).status();
        assert!(killed.is_ok());
        let status = child.wait().expect("it ends");
        let said = said_in(path);
        assert_eq!(status.code(), Some(0), "{said}");
        let [restart] = &super::restarts(path)[..] else { panic!("one restart: {said}") };
        assert_eq!(restart["state"].to_string(), state, "{said}");
        assert_eq!(figures(path), expected, "{said}");
        assert_eq!(tensors(&path.join("out"), 60), tensors(&path.join("expected"), 60));
        fs::remove_dir_all(path.join("out")).expect("the results");
    }
}

#[test]
#[ignore = "takes half a minute, and needs root"]
fn a_run_continues_without_a_machine_that_has_lost_its_network() {
    let machines = Machines::new('d').expect("network namespaces need root and iproute2");
    let path = machines.path();
    let set = ["pipeline.ranks=4", "run.steps=60", "run.checkpoint_every=4", "run.deadline_seconds=6"];
    let expected = on_threads(path, &set);
    let mut child = spawn_saying(&mut machines.launch([2, 1, 1], &["train", "small.toml"], &set), path);
    super::launch::wait_for_step(path, 9);
    assert!(ip(&["-n", &machines.names[2], "link", "set", "net", "down"]));
    let status = child.wait().expect("it ends");
    let said = said_in(path);
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(said.contains("with 3 ranks instead of 4"), "{said}");
    assert_eq!(figures(path), expected, "{said}");
}

#[test]
#[ignore = "takes a quarter of a minute, and needs root"]
fn a_slow_link_and_a_slow_machine_change_no_bits() {
    let machines = Machines::new('e').expect("network namespaces need root and iproute2");
    let path = machines.path();
    let set = ["pipeline.ranks=4", "run.steps=6", "run.checkpoint_every=2"];
    let expected = on_threads(path, &set);
    machines.copy_program_and_slow_down();
    let mut launch = machines.launch([2, 1, 1], &["train", "small.toml"], &set);
    require_success(&launch.env("PIPEWRIGHT_FAULT", "half:1:2:1000").output().expect("ip is installed"));
    assert_eq!(figures(path), expected);
    assert_eq!(tensors(&path.join("out"), 6), tensors(&path.join("expected"), 6));
}

/// Checks that a launch on two machines is refused with this sentence, before the run has a folder.
fn check_refused(machines: &Machines, hosts: &str, agent: Option<&Path>, expected: &[&str]) {
    let mut command = machines.launch_on(hosts);
    command.env("OMPI_MCA_plm_rsh_agent", agent.unwrap_or(&machines.shell()));
    command.args(["--", "train", "small.toml", "--set", "pipeline.ranks=2"]);
    let output = command.output().expect("ip is installed");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    for part in expected {
        assert!(said.contains(part), "`{part}` in: {said}");
    }
    assert!(!machines.path().join("out").exists());
}

#[test]
fn each_failure_of_a_first_start_says_what_to_do() {
    let Some(machines) = machines('f') else { return };
    let [a, b, _] = ADDRESSES;
    let both = format!("{a},{b}");
    let check = |before: &str, expected: &[&str]| {
        machines.write_shell(before);
        check_refused(&machines, &both, None, expected);
    };
    let fail = |said: &str| format!("echo \"{said}\" >&2; exit 255;");
    let asks = fail("me@10.78.0.2: Permission denied (publickey,password).");
    check(&asks, &["the host 10.78.0.2 asks for a password", "ssh-copy-id 10.78.0.2"]);
    check(&fail("Host key verification failed."), &["the key of the host 10.78.0.2 is not known"]);
    let refused = "ssh: connect to host 10.78.0.2 port 22: Connection refused";
    check(&fail(refused), &["the host 10.78.0.2 has no ssh server", "nc -zv 10.78.0.2 22"]);
    let bin = machines.home(1).join("bin");
    let check_program = |name: &str, text: &str, expected: &[&str]| {
        fs::create_dir(&bin).expect("a folder");
        fs::write(bin.join(name), format!("#!/bin/sh\necho \"{text}\"\n")).expect("a file");
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).expect("its owner may");
        check("export PATH=$PWD/bin:$PATH;", expected);
        fs::remove_dir_all(&bin).expect("the program");
    };
    let place = "/.cache/pipewright/linux-riscv64/pipewright on that host";
    check_program("uname", "Linux riscv64", &["the host 10.78.0.2 is Linux riscv64", place]);
    let other = "the host 10.78.0.2 has another MPI, `mpirun (Open MPI) 99.0.1`";
    check_program("mpirun", "mpirun (Open MPI) 99.0.1", &[other]);
    let without = "mkdir -p bin; for p in uname head tr touch sh; do ln -sf $(command -v $p) bin/; done; export PATH=$PWD/bin;";
    check(without, &["the host 10.78.0.2 has no MPI", "apt-get install openmpi-bin"]);

    machines.write_shell("");
    check_refused(
        &machines,
        &format!("{a},nowhere"),
        None,
        &["no machine has the name nowhere", "getent hosts nowhere"],
    );
    check_refused(&machines, &both, Some(Path::new("/no/ssh")), &["`/no/ssh` is missing on this machine"]);
    check_refused(&machines, &format!("{b},{a}"), None, &["the first host, 10.78.0.2, is not this machine"]);
}

#[test]
#[ignore = "takes two minutes, and needs root"]
fn machines_that_do_not_reach_each_other_are_named() {
    let machines = Machines::new('g').expect("network namespaces need root and iproute2");
    // Both reach the first machine, and not each other.
    assert!(ip(&["-n", &machines.names[1], "route", "add", "blackhole", "10.78.0.3/32"]));
    let expected =
        ["the processes on 10.78.0.2 and 10.78.0.3 do not reach each other", "OMPI_MCA_btl_tcp_if_include="];
    check_refused(&machines, &ADDRESSES.join(","), None, &expected);
}

/// Waits until the first machine has some bytes of a file of a checkpoint that another machine sends.
fn wait_for_part(folder: &Path, name: &str) {
    let start = Instant::now();
    let has_part = || {
        let checkpoints = fs::read_dir(folder.join("out/checkpoints")).into_iter().flatten().flatten();
        let mut saving =
            checkpoints.filter(|entry| entry.file_name().to_string_lossy().starts_with(".saving-"));
        saving.any(|entry| fs::metadata(entry.path().join(name)).is_ok_and(|found| found.len() > 0))
    };
    while !has_part() {
        assert!(start.elapsed() < Duration::from_secs(120), "no part comes");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
#[ignore = "takes a minute, and needs root"]
fn a_process_that_is_killed_while_it_sends_a_part_leaves_no_part_of_a_checkpoint() {
    let machines = Machines::new('h').expect("network namespaces need root and iproute2");
    let path = machines.path();
    // A part has several pieces, and takes some seconds.
    let set = ["model.hidden_size=128", "pipeline.ranks=4", "run.steps=8", "run.checkpoint_every=3"];
    let set = [&set[..], &["run.deadline_seconds=20"]].concat();
    let expected = on_threads(path, &set);
    machines.copy_program_and_slow_down();
    let mut child = spawn_saying(&mut machines.launch([2, 1, 1], &["train", "small.toml"], &set), path);
    wait_for_part(path, "rank-0002.safetensors");
    let killed = Command::new("kill").arg("-KILL").args(processes_of(&machines.names[1])).status();
    assert!(killed.is_ok());
    let status = child.wait().expect("it ends");
    let said = said_in(path);
    assert_eq!(status.code(), Some(0), "{said}");
    assert_eq!(super::restarts(path).len(), 1, "{said}");
    assert_eq!(figures(path), expected, "{said}");
    assert_eq!(tensors(&path.join("out"), 8), tensors(&path.join("expected"), 8));
    let left = fs::read_dir(path.join("out/checkpoints")).expect("a folder").flatten();
    assert!(left.into_iter().all(|entry| !entry.file_name().to_string_lossy().starts_with('.')), "{said}");
}

#[test]
#[ignore = "takes a quarter of a minute, and needs root"]
fn two_runs_on_the_same_machines_do_not_disturb_each_other() {
    let machines = Machines::new('i').expect("network namespaces need root and iproute2");
    let path = machines.path();
    let set = ["pipeline.ranks=4", "run.steps=6", "run.checkpoint_every=2"];
    let expected = on_threads(path, &set);
    let children = ["first", "second"].map(|out| {
        let out_set = format!("run.out={out}");
        let set = [&set[..], &[&out_set]].concat();
        let mut launch = machines.launch([2, 1, 1], &["train", "small.toml"], &set);
        launch.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("ip is installed")
    });
    for (child, out) in children.into_iter().zip(["first", "second"]) {
        require_success(&child.wait_with_output().expect("it ends"));
        assert_eq!(figures_of(&path.join(out)), expected);
        assert_eq!(tensors(&path.join(out), 6), tensors(&path.join("expected"), 6));
    }
    assert_eq!([1, 2].map(|machine| (machines.builds(machine), machines.left(machine))), [(1, 0), (1, 0)]);
}

#[test]
#[ignore = "takes a quarter of a minute, and needs root"]
fn a_run_waits_for_space_on_the_disk_of_the_first_machine() {
    let machines = Machines::new('j').expect("network namespaces need root and iproute2");
    let path = machines.path();
    let disk = path.join("disk");
    let _disk = Disk::mount(disk.clone(), 8 << 20).expect("mounting a file system needs root");
    let set = ["pipeline.ranks=4", "run.steps=8", "run.checkpoint_every=3", "run.keep_checkpoints=1"];
    let expected = on_threads(path, &set);
    let set = [&set[..], &["run.out=disk/out", "run.deadline_seconds=30"]].concat();
    let filler = disk.join("filler");
    fs::write(&filler, vec![1; 4 << 20]).expect("there is space");
    let mut child = spawn_saying(&mut machines.launch([2, 1, 1], &["train", "small.toml"], &set), path);
    let start = Instant::now();
    let says = |part: &str| said_in(path).contains(part);
    // The first checkpoint is saved before the disk is full.
    while !disk.join("out/checkpoints/step-00000003").exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "{}", said_in(path));
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut full = fs::File::options().append(true).open(&filler).expect("the file");
    while std::io::Write::write_all(&mut full, &[1; 4096]).is_ok() {}
    while !says("the run waits for space on the disk") {
        assert!(start.elapsed() < Duration::from_secs(120), "{}", said_in(path));
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(full);
    fs::remove_file(&filler).expect("the file");
    let status = child.wait().expect("it ends");
    let said = said_in(path);
    assert_eq!(status.code(), Some(0), "{said}");
    assert_eq!(figures_of(&disk.join("out")), expected, "{said}");
    assert_eq!(tensors(&disk.join("out"), 8), tensors(&path.join("expected"), 8));
}

#[test]
#[ignore = "takes half a minute, and needs root"]
fn empty_files_and_files_of_one_byte_end_the_start_with_a_sentence() {
    let machines = Machines::new('k').expect("network namespaces need root and iproute2");
    let path = machines.path();
    write_model(path);
    let check = |file: &str, content: &str, expected: &str| {
        let whole = fs::read(path.join(file)).expect("the file");
        fs::write(path.join(file), content).expect("a file");
        let set = ["pipeline.ranks=2"];
        let output = machines.launch([1, 1, 0], &["train", "small.toml"], &set).output();
        let output = output.expect("ip is installed");
        let said = words(&output);
        assert_eq!(output.status.code(), Some(2), "{file}: {said}");
        assert!(said.contains("error: ") && said.contains(expected), "{file}: {said}");
        assert!(!path.join("out/metrics.jsonl").exists(), "{file}: {said}");
        assert_eq!(machines.left(1), 0, "{file}: {said}");
        fs::write(path.join(file), whole).expect("a file");
    };
    for content in ["", "x"] {
        check("text.txt", content, ": the data ");
        check("model/config.json", content, "config.json");
        check("model/model.safetensors", content, "model.safetensors");
    }
}
