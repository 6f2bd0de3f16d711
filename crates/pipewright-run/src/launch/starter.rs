//! [`Starter`]: the program that starts processes, and the hosts where it starts them.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::RunError;
use crate::fault::{LAUNCHED, Start};
use crate::launch::binary_copies::{HostBinary, bring};
use crate::launch::hosts::{Host, HostSource, read_file};
use crate::launch::short_command::run;
use crate::launch::slurm;

/// The longest time in which a program says its version.
const LONGEST_VERSION: Duration = Duration::from_secs(60);

/// A program that starts processes.
#[derive(Clone, Debug)]
pub struct Starter {
    kind: Kind,
    /// This binary, which the hosts have under the same path unless `copies` say otherwise.
    binary: PathBuf,
    /// The first line that the program prints about its version.
    version: String,
    /// Where the hosts have the binary, if they share no folder.
    copies: Option<Vec<HostBinary>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun` of another library, such as MPICH.
    Mpi,
    /// `srun` of Slurm.
    Slurm,
}

impl Starter {
    /// Finds the hosts and the program for them. The hosts are the given ones; without them, the hosts of the
    /// allocation that this process is in, unless the processes run here; and none for this machine alone.
    ///
    /// # Errors
    /// Fails if the hosts are not known, if this build has no MPI, or if the program is missing.
    pub fn find(given: Option<&HostSource>, is_here: bool) -> Result<(Self, Vec<Host>), RunError> {
        let nodes = env::var("SLURM_JOB_NODELIST").ok().filter(|_| !is_here && given.is_none());
        let hosts = match (given, &nodes) {
            (Some(HostSource::File(path)), _) => read_file(path)?,
            (Some(HostSource::List(hosts)), _) => hosts.clone(),
            (None, Some(nodes)) => slurm::hosts_of(nodes)?,
            (None, None) => Vec::new(),
        };
        if !cfg!(feature = "mpi") {
            return Err(RunError::input(
                "this build cannot run ranks as processes: build it with `cargo build --release --features mpi`",
            ));
        }
        let binary = env::current_exe()
            .map_err(|error| RunError::input(format!("the path of this program is not known: {error}")))?;
        let (program, advice) = match nodes {
            Some(_) => ("srun", "it belongs to Slurm, and must be in PATH"),
            None => ("mpirun", "on Debian: apt-get install openmpi-bin"),
        };
        let version = run(Command::new(program).arg("--version"), LONGEST_VERSION, || false);
        let version = version.map_err(|error| {
            RunError::input(format!("`{program} --version` cannot be run: {error}; {advice}"))
        })?;
        let is_open = version.stdout.contains("Open MPI");
        let kind = match (program, is_open) {
            ("srun", _) => Kind::Slurm,
            (_, true) => Kind::OpenMpi,
            (_, false) => Kind::Mpi,
        };
        let version = version.stdout.lines().next().unwrap_or_default().to_owned();
        Ok((Self { kind, binary, version, copies: None }, hosts))
    }

    /// Brings this program to hosts that share no folder with this machine, which is the first of them. The first process
    /// of the run then sends its files to the others. `say` gets a sentence about each copy.
    ///
    /// # Errors
    /// Fails with every host that cannot have it, and why.
    pub fn bring_binary(&mut self, hosts: &[Host], say: impl Fn(&str)) -> Result<(), RunError> {
        let is_open = self.kind == Kind::OpenMpi;
        self.copies = Some(bring(hosts, &self.binary, &self.version, is_open, say)?);
        Ok(())
    }

    /// Returns whether the hosts share no folder.
    pub(super) fn sends_files(&self) -> bool {
        self.copies.is_some()
    }

    /// Returns whether a host has a build for another system.
    pub(super) fn is_foreign(&self, host: &Host) -> bool {
        self.copy_on(host).is_some_and(|copy| copy.is_foreign)
    }

    fn copy_on(&self, host: &Host) -> Option<&HostBinary> {
        self.copies.iter().flatten().find(|copy| copy.host == host.name)
    }

    /// Returns whether the hosts belong to an allocation of Slurm.
    pub(super) fn is_slurm(&self) -> bool {
        self.kind == Kind::Slurm
    }

    /// Lets hosts join the allocation of Slurm again that have left it, if the run is in one.
    ///
    /// # Errors
    /// Returns words about hosts that are free and cannot join.
    pub(super) fn rejoin(&self, hosts: &[Host], is_stopped: impl Fn() -> bool) -> Result<(), String> {
        if self.is_slurm() { slurm::rejoin(hosts, is_stopped) } else { Ok(()) }
    }

    /// Returns the command that starts `count` processes of this binary with the arguments `words`, on the
    /// hosts in their order, or on this machine if there are none.
    pub(super) fn command(&self, count: u32, hosts: &[Host], words: &[String], start: &Start) -> Command {
        let mut command = match self.kind {
            Kind::Slurm => slurm::srun(count, hosts),
            Kind::OpenMpi => open_mpi(hosts),
            Kind::Mpi => Command::new("mpirun"),
        };
        if self.sends_files() && !self.is_slurm() && !hosts.is_empty() {
            self.add_parts(&mut command, count, hosts, words);
            command.env(LAUNCHED, start.to_string()).stdin(Stdio::null());
            return command;
        }
        command.args(["-n", &count.to_string()]);
        if !hosts.is_empty() && !self.is_slurm() {
            let list = hosts.iter().map(|host| format!("{}:{}", host.name, host.slots));
            command.args(["--host", &list.collect::<Vec<_>>().join(",")]);
        }
        if self.kind == Kind::OpenMpi {
            // The others pass all variables on to other hosts.
            command.args(["-x", LAUNCHED]);
        }
        command.env(LAUNCHED, start.to_string()).arg(&self.binary).args(words).stdin(Stdio::null());
        command
    }
}

impl Starter {
    /// Adds a part for each host to a command, because the hosts have the binary under different paths. The ranks follow
    /// the order of the hosts.
    fn add_parts(&self, command: &mut Command, count: u32, hosts: &[Host], words: &[String]) {
        let mut left = count;
        for (index, host) in hosts.iter().enumerate() {
            let own = left.min(host.slots);
            if own == 0 {
                return;
            }
            left -= own;
            if index > 0 {
                command.arg(":");
            }
            command.args(["-n", &own.to_string(), "--host", &format!("{}:{}", host.name, host.slots)]);
            if self.kind == Kind::OpenMpi {
                command.args(["-x", LAUNCHED]);
            }
            let copy = self.copy_on(host);
            if let Some(home) = copy.and_then(|copy| copy.home.as_ref()) {
                // The working folder of this machine need not exist there.
                command.arg("-wdir").arg(home);
            }
            command.arg(copy.map_or(&self.binary, |copy| &copy.binary)).args(words);
        }
    }
}

/// The bytes of the longest message that Open MPI sends over TCP without a permission of the receiver. By default it is 64 KiB.
/// The permission of a longer message goes over the connection that carries the data of the other direction, and waits behind
/// them. On a link of 100 Mbit/s that both directions used, messages of 4 MiB arrived at 0.38 of its rate with permissions, and
/// at 0.91 without. The memory for such a message is used again, and only for what it holds.
const LONGEST_AT_ONCE: &str = "16842752";

/// Returns `mpirun` of Open MPI. It refuses more processes than cores and the user root by default, and binds
/// each process to a core. The user's own settings have precedence.
fn open_mpi(hosts: &[Host]) -> Command {
    let mut command = Command::new("mpirun");
    command.arg("--quiet");
    let mut set = vec![("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")];
    if hosts.is_empty() {
        // The names of version 4 and of version 5.
        set.extend([
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
            // Inside an allocation of Slurm, it would start the processes on the nodes of the allocation.
            ("OMPI_MCA_plm", "^slurm"),
            ("OMPI_MCA_ras", "^slurm"),
            ("PRTE_MCA_plm", "^slurm"),
            ("PRTE_MCA_ras", "^slurm"),
        ]);
    } else {
        set.extend([
            ("OMPI_MCA_btl_tcp_eager_limit", LONGEST_AT_ONCE),
            ("OMPI_MCA_btl_tcp_rndv_eager_limit", LONGEST_AT_ONCE),
        ]);
    }
    set.extend([
        ("OMPI_MCA_hwloc_base_binding_policy", "none"),
        ("PRTE_MCA_hwloc_default_binding_policy", "none"),
    ]);
    command.envs(set.into_iter().filter(|(name, _)| env::var_os(name).is_none()));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(kind: Kind, expected: &str) {
        check_with(kind, None, expected);
    }

    fn check_with(kind: Kind, copies: Option<Vec<HostBinary>>, expected: &str) {
        let starter = Starter { kind, binary: "/bin/pipewright".into(), version: String::new(), copies };
        let hosts = [("a", 2), ("b", 1)].map(|(name, slots)| Host { name: name.to_owned(), slots });
        let start = Start { number: 2, ..Start::default() };
        let command = starter.command(3, &hosts, &["train".to_owned()], &start);
        let restart = command.get_envs().find_map(|(name, value)| value.filter(|_| name == LAUNCHED));
        assert_eq!(restart, Some("2".as_ref()));
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(words.join(" "), expected);
    }

    #[test]
    fn messages_between_hosts_need_no_permission() {
        let limit = |hosts: &[Host]| {
            let command = open_mpi(hosts);
            let limit = command.get_envs().find(|(name, _)| *name == "OMPI_MCA_btl_tcp_eager_limit");
            limit.and_then(|(_, value)| value.map(ToOwned::to_owned))
        };
        assert_eq!(limit(&[]), None);
        let host = Host { name: "a".to_owned(), slots: 1 };
        assert_eq!(limit(&[host]).as_deref(), Some(LONGEST_AT_ONCE.as_ref()));
    }

    #[test]
    fn hosts_without_a_shared_folder_have_their_own_paths() {
        let own =
            HostBinary { host: "a".to_owned(), binary: "/bin/pw".into(), home: None, is_foreign: false };
        let (binary, home) = ("/h/pw".into(), Some("/h".into()));
        let other = HostBinary { host: "b".to_owned(), binary, home, is_foreign: false };
        let expected = "--quiet -n 2 --host a:2 -x PIPEWRIGHT_LAUNCHED /bin/pw train : \
                        -n 1 --host b:1 -x PIPEWRIGHT_LAUNCHED -wdir /h /h/pw train";
        check_with(Kind::OpenMpi, Some(vec![own, other]), expected);
    }

    #[test]
    fn each_program_has_its_own_arguments() {
        check(Kind::OpenMpi, "--quiet -n 3 --host a:2,b:1 -x PIPEWRIGHT_LAUNCHED /bin/pipewright train");
        check(Kind::Mpi, "-n 3 --host a:2,b:1 /bin/pipewright train");
        check(
            Kind::Slurm,
            "--mpi=pmix --kill-on-bad-exit=1 --overlap --distribution=arbitrary --nodelist=a,a,b -n 3 /bin/pipewright train",
        );
    }
}
