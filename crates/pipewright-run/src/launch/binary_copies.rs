//! Brings this program to hosts that do not have it: into a folder of its own for each build, in the home folder of the
//! host, over the same shell that `mpirun` uses. A host of another system gets no copy; the user puts a build there.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::RunError;
use crate::launch::hosts::{Host, is_own_address, is_this_machine};
use crate::launch::remote_shell::RemoteShell;
use crate::launch::short_command::{Printed, run, wait};
use crate::training::remote_files::{CACHE, time_to_send};

/// The longest time of a question to a host.
const LONGEST_PROBE: Duration = Duration::from_secs(30);

/// The time that a copy may take besides its bytes.
const COPY: Duration = Duration::from_secs(60);

/// The number of builds that a host keeps.
const KEPT: usize = 3;

/// The number of hexadecimal digits in the name of a build's folder.
const DIGITS: usize = 16;

/// The version of this program, which a build for another system must have too.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Where a host has this program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostBinary {
    pub(super) host: String,
    pub(super) binary: PathBuf,
    /// The home folder there; `None` on this machine.
    pub(super) home: Option<PathBuf>,
    /// Whether it was built for another system, so that only its version is known.
    pub(super) is_foreign: bool,
}

/// The facts that a host states about itself.
#[derive(Debug, Default, PartialEq, Eq)]
struct Probe {
    system: String,
    home: String,
    /// The program that `mpirun` starts there; empty if there is none.
    daemon: String,
    /// The first line that `mpirun --version` prints there; empty if there is no `mpirun`.
    mpi: String,
    /// Whether the host has this build.
    has_build: bool,
    /// The version of the build for the system of the host that the user has put there; empty if there is none.
    foreign: String,
}

/// Brings this program to all hosts, and returns where each has it. The first host is this machine.
///
/// # Errors
/// Fails with every host that cannot have it.
pub(super) fn bring(
    hosts: &[Host],
    binary: &Path,
    mpi: &str,
    is_open_mpi: bool,
    say: impl Fn(&str),
) -> Result<Vec<HostBinary>, RunError> {
    let shell = RemoteShell::of_environment();
    let is_own = |host: &Host| is_this_machine(&host.name) || is_own_address(&host.name);
    if hosts.first().is_none_or(|host| !is_own(host)) {
        let first = hosts.first().map_or("", |host| &host.name);
        return Err(RunError::input(format!(
            "the first host, {first}, is not this machine: the processes on it read the files, so name this machine first, or \
             add `--shared` if all hosts have the files under the same paths"
        )));
    }
    let hash = build_of(binary).map_err(RunError::input)?;
    let (mut places, mut refusals) = (Vec::new(), Vec::new());
    for host in hosts {
        if is_own(host) {
            let (host, binary) = (host.name.clone(), binary.to_owned());
            places.push(HostBinary { host, binary, home: None, is_foreign: false });
            continue;
        }
        let place = probe(&shell, &host.name, &hash).and_then(|probe| {
            require_mpi(&host.name, &probe, mpi, is_open_mpi)?;
            place(&host.name, &probe, &hash).and_then(|place| {
                if !place.is_foreign && !probe.has_build {
                    say(&format!(
                        "this program is copied to the host {}: {}",
                        host.name,
                        place.binary.display()
                    ));
                    copy(&shell, &host.name, binary, &hash)?;
                }
                Ok(place)
            })
        });
        match place {
            Ok(place) => places.push(place),
            Err(refusal) => refusals.push(refusal),
        }
    }
    if refusals.is_empty() { Ok(places) } else { Err(RunError::input(refusals.join("\n"))) }
}

/// Returns the hash of a program, which says whether two hosts have the same build.
pub(super) fn build_of(binary: &Path) -> std::io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(binary)?)?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Returns the system of this build, as `uname -s` and `uname -m` print it.
fn own_system() -> String {
    let arch = match (std::env::consts::OS, std::env::consts::ARCH) {
        ("macos", "aarch64") => "arm64",
        (_, arch) => arch,
    };
    let system = match std::env::consts::OS {
        "linux" => "Linux",
        "macos" => "Darwin",
        other => other,
    };
    format!("{system} {arch}")
}

/// Returns the folder of the builds for another system, below the one of all builds.
fn foreign_folder(system: &str) -> String {
    let plain = |sign: char| if sign.is_ascii_alphanumeric() { sign.to_ascii_lowercase() } else { '-' };
    system.chars().map(plain).collect()
}

/// Asks a host about itself.
fn probe(shell: &RemoteShell, host: &str, hash: &str) -> Result<Probe, String> {
    let build = &hash[..DIGITS];
    // A shell may print lines of its own, so each line has a mark.
    let line = format!(
        "c=\"$HOME/{CACHE}\"; s=$(uname -s -m); echo \"pw system $s\"; echo \"pw home $HOME\"; \
         echo \"pw daemon $(command -v orted || command -v prted || command -v hydra_pmi_proxy)\"; \
         echo \"pw mpi $(mpirun --version 2>/dev/null | head -n 1)\"; \
         if test -x \"$c/{build}/pipewright\"; then touch \"$c/{build}\"; echo \"pw build yes\"; fi; \
         f=\"$c/$(printf %s \"$s\" | tr A-Z a-z | tr -c a-z0-9 -)/pipewright\"; \
         if test -x \"$f\"; then echo \"pw foreign $(\"$f\" --version 2>/dev/null)\"; fi; echo \"pw end\""
    );
    let mut command = shell.command(host, &line);
    let printed = match run(&mut command, LONGEST_PROBE, || false) {
        Ok(printed) => printed,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(shell.missing()),
        Err(_) => return Err(shell.explain(host, None)),
    };
    read_probe(&printed.stdout).ok_or_else(|| shell.explain(host, Some(&printed)))
}

/// Reads what a host says; `None` if it does not come to the end.
fn read_probe(text: &str) -> Option<Probe> {
    let mut probe = Probe::default();
    for line in text.lines().filter_map(|line| line.strip_prefix("pw ")) {
        let (name, value) = line.split_once(' ').unwrap_or((line, ""));
        let value = value.trim().to_owned();
        match name {
            "system" => probe.system = value,
            "home" => probe.home = value,
            "daemon" => probe.daemon = value,
            "mpi" => probe.mpi = value,
            "build" => probe.has_build = true,
            "foreign" => probe.foreign = value,
            "end" => return Some(probe),
            _ => {}
        }
    }
    None
}

/// Refuses a host without MPI or with another MPI. `mpi` is the first line that `mpirun --version` prints here.
fn require_mpi(host: &str, probe: &Probe, mpi: &str, is_open_mpi: bool) -> Result<(), String> {
    if probe.daemon.is_empty() {
        return Err(format!(
            "the host {host} has no MPI: `ssh {host} command -v orted mpirun` prints nothing; on that host: apt-get install \
             openmpi-bin, or put its folder into the PATH of shells without a terminal"
        ));
    }
    // The daemons of two series of Open MPI do not understand each other.
    let series = |text: &str| {
        let version = text.split_whitespace().last().unwrap_or_default();
        version.split('.').next().unwrap_or_default().to_owned()
    };
    if is_open_mpi && !probe.mpi.is_empty() && series(&probe.mpi) != series(mpi) {
        return Err(format!(
            "the host {host} has another MPI, `{}`, and this machine `{mpi}`: `ssh {host} mpirun --version` shows it; install the \
             same version on both",
            probe.mpi
        ));
    }
    Ok(())
}

/// Returns where a host has this program, or will have it.
fn place(host: &str, probe: &Probe, hash: &str) -> Result<HostBinary, String> {
    let home = PathBuf::from(&probe.home);
    let cache = home.join(CACHE);
    let place = |folder: &str, is_foreign| HostBinary {
        host: host.to_owned(),
        binary: cache.join(folder).join("pipewright"),
        home: Some(home.clone()),
        is_foreign,
    };
    let own = own_system();
    if probe.system == own {
        return Ok(place(&hash[..DIGITS], false));
    }
    let found = place(&foreign_folder(&probe.system), true);
    let system = &probe.system;
    let path = found.binary.display();
    let expected = format!("pipewright {VERSION}");
    match probe.foreign.as_str() {
        version if version == expected => Ok(found),
        "" => Err(format!(
            "the host {host} is {system}, and this build is for {own}: build version {VERSION} for it (`cargo build --release \
             --features mpi` there), and copy it to {path} on that host"
        )),
        version => Err(format!(
            "the host {host} is {system}, and its build at {path} says `{version}` in place of `{expected}`: build version \
             {VERSION} there again"
        )),
    }
}

/// Copies this program to a host: under another name, and then with its own name, so that no part of it is ever started.
/// Removes all but the newest builds there.
fn copy(shell: &RemoteShell, host: &str, binary: &Path, hash: &str) -> Result<(), String> {
    let unreadable = |error| format!("{}: cannot be read: {error}", binary.display());
    let file = File::open(binary).map_err(unreadable)?;
    let bytes = file.metadata().map_err(unreadable)?.len();
    let build = &hash[..DIGITS];
    let line = format!(
        "set -e; c=\"$HOME/{CACHE}\"; d=\"$c/{build}\"; mkdir -p \"$d\"; n=\"$d/.new.$$\"; cat > \"$n\"; \
         if test $(wc -c < \"$n\") -ne {bytes}; then rm -f \"$n\"; echo \"the copy is not complete\" >&2; exit 1; fi; \
         chmod 755 \"$n\"; mv -f \"$n\" \"$d/pipewright\"; cd \"$c\"; \
         ls -1dt -- [0-9a-f]*/ | grep -E \"^[0-9a-f]{{{DIGITS}}}/$\" | tail -n +{} | while read o; do rm -rf -- \"$o\"; done",
        KEPT + 1
    );
    let limit = COPY + time_to_send(bytes);
    let printed = copied(&mut shell.command(host, &line), file, limit);
    match printed {
        Some(printed) if printed.is_success => Ok(()),
        Some(printed) => Err(format!(
            "this program cannot be copied to the host {host}: {}; make room in its home folder",
            printed.stderr.trim().lines().last().unwrap_or("the shell there prints nothing")
        )),
        None => Err(shell.explain(host, None)),
    }
}

/// Runs a command that reads a file, until a time is over.
fn copied(command: &mut Command, file: File, limit: Duration) -> Option<Printed> {
    let child = command.stdin(file).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().ok()?;
    let since = Instant::now();
    wait(child, || since.elapsed() > limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "0123456789abcdef0123456789abcdef";

    fn probe_of(system: &str, foreign: &str) -> Probe {
        let (system, foreign) = (system.to_owned(), foreign.to_owned());
        Probe {
            system,
            home: "/home/b".to_owned(),
            daemon: "/usr/bin/orted".to_owned(),
            foreign,
            ..Probe::default()
        }
    }

    #[test]
    fn a_host_says_what_it_is_between_lines_of_its_shell() {
        let text = "Welcome\npw system Linux x86_64\npw home /home/b\npw daemon /usr/bin/orted\n\
                    pw mpi mpirun (Open MPI) 4.1.4\npw build yes\nfortune\npw end\n";
        let probe = read_probe(text).expect("it comes to the end");
        let expected = Probe {
            mpi: "mpirun (Open MPI) 4.1.4".to_owned(),
            has_build: true,
            ..probe_of("Linux x86_64", "")
        };
        assert_eq!(probe, expected);
        assert_eq!(read_probe("pw system Linux x86_64\n"), None);
    }

    #[test]
    fn a_build_has_its_own_folder_and_another_system_gets_none() {
        let own = place("b", &probe_of(&own_system(), ""), HASH).expect("the same system");
        assert_eq!(own.binary, Path::new("/home/b/.cache/pipewright/0123456789abcdef/pipewright"));
        let right = format!("pipewright {VERSION}");
        let foreign = place("b", &probe_of("Linux riscv64", &right), HASH).expect("a build of the user");
        assert_eq!(foreign.binary, Path::new("/home/b/.cache/pipewright/linux-riscv64/pipewright"));
        assert!(foreign.is_foreign && !own.is_foreign);
        let refuse = |foreign: &str, part: &str| {
            let refusal = place("b", &probe_of("Linux riscv64", foreign), HASH).expect_err("no build");
            assert!(refusal.contains(part) && refusal.contains("/linux-riscv64/pipewright"), "{refusal}");
        };
        refuse("", "the host b is Linux riscv64, and this build is for ");
        refuse("pipewright 0.0.0", "says `pipewright 0.0.0` in place of");
    }

    #[test]
    fn a_host_needs_mpi_of_the_same_series() {
        let check = |daemon: &str, mpi: &str, expected: Option<&str>| {
            let (daemon, mpi) = (daemon.to_owned(), mpi.to_owned());
            let probe = Probe { daemon, mpi, ..probe_of("Linux x86_64", "") };
            let refusal = require_mpi("b", &probe, "mpirun (Open MPI) 4.1.4", true).err();
            assert_eq!(refusal.is_some(), expected.is_some(), "{refusal:?}");
            assert!(expected.is_none_or(|part| refusal.is_some_and(|refusal| refusal.contains(part))));
        };
        check("/usr/bin/orted", "mpirun (Open MPI) 4.1.6", None);
        check("/usr/bin/orted", "", None);
        check("/usr/bin/prted", "mpirun (Open MPI) 5.0.3", Some("has another MPI"));
        check("", "", Some("has no MPI"));
    }
}
