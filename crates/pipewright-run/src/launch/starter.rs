//! [`Starter`]: the program that starts processes, and the hosts where it starts them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::RunError;
use crate::fault::{LAUNCHED, Start};
use crate::launch::hosts::{Host, read_file};
use crate::launch::short_command::run;
use crate::launch::slurm;

/// The longest time in which a program says its version.
const LONGEST_VERSION: Duration = Duration::from_secs(60);

/// A program that starts processes.
#[derive(Clone, Debug)]
pub struct Starter {
    kind: Kind,
    /// This binary, which the hosts have under the same path.
    binary: PathBuf,
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
    /// Finds the hosts and the program for them. The hosts are those of the file; without one, the hosts of the
    /// allocation that this process is in, unless the processes run here; and none for this machine alone.
    ///
    /// # Errors
    /// Fails if the hosts are not known, if this build has no MPI, or if the program is missing.
    pub fn find(hostfile: Option<&Path>, is_here: bool) -> Result<(Self, Vec<Host>), RunError> {
        let nodes = env::var("SLURM_JOB_NODELIST").ok().filter(|_| !is_here && hostfile.is_none());
        let hosts = match (hostfile, &nodes) {
            (Some(path), _) => read_file(path)?,
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
        Ok((Self { kind, binary }, hosts))
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
        let starter = Starter { kind, binary: "/bin/pipewright".into() };
        let hosts = [("a", 2), ("b", 1)].map(|(name, slots)| Host { name: name.to_owned(), slots });
        let start = Start { number: 2, ..Start::default() };
        let command = starter.command(3, &hosts, &["train".to_owned()], &start);
        let restart = command.get_envs().find_map(|(name, value)| value.filter(|_| name == LAUNCHED));
        assert_eq!(restart, Some("2".as_ref()));
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(words.join(" "), expected);
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
