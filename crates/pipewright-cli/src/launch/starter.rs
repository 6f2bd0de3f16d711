//! [`Starter`]: the program that starts processes, and its arguments.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::failure::Failure;
use crate::launch::allocation;
use crate::launch::hosts::{Host, Places};
use crate::launch::short_command::run;
use pipewright_run::fault::{LAUNCHED, Start};

/// The longest time in which a program says its version.
const LONGEST_VERSION: Duration = Duration::from_secs(60);

/// A program that starts processes.
#[derive(Clone, Debug)]
pub(crate) struct Starter {
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
    /// Finds the program for some places.
    ///
    /// # Errors
    /// Fails if this build has no MPI, or the program is missing.
    pub(crate) fn find(places: &Places) -> Result<Self, Failure> {
        if !cfg!(feature = "mpi") {
            return Err(Failure::input(
                "this build cannot run ranks as processes: build it with `cargo build --release --features mpi`",
            ));
        }
        let binary = env::current_exe()
            .map_err(|error| Failure::input(format!("the path of this program is not known: {error}")))?;
        let (program, advice) = if matches!(places, Places::Slurm(_)) {
            ("srun", "it belongs to Slurm, and must be in PATH")
        } else {
            ("mpirun", "on Debian: apt-get install openmpi-bin")
        };
        let version = run(Command::new(program).arg("--version"), LONGEST_VERSION, || false);
        let version = version.map_err(|error| {
            Failure::input(format!("`{program} --version` cannot be run: {error}; {advice}"))
        })?;
        let is_open = version.stdout.contains("Open MPI");
        let kind = match (program, is_open) {
            ("srun", _) => Kind::Slurm,
            (_, true) => Kind::OpenMpi,
            (_, false) => Kind::Mpi,
        };
        Ok(Self { kind, binary })
    }

    /// Lets hosts join the allocation of Slurm again that have left it, if the run is in one.
    ///
    /// # Errors
    /// Returns words about hosts that are free and cannot join.
    pub(super) fn rejoin(&self, hosts: &[Host], is_stopped: impl Fn() -> bool) -> Result<(), String> {
        if self.kind == Kind::Slurm { allocation::rejoin(hosts, is_stopped) } else { Ok(()) }
    }

    /// Returns the command that starts `count` processes of this binary with the arguments `words`, on the
    /// hosts in their order, or on this machine if there are none.
    pub(crate) fn command(&self, count: u32, hosts: &[Host], words: &[String], start: &Start) -> Command {
        let mut command = match self.kind {
            Kind::Slurm => srun(count, hosts),
            Kind::OpenMpi => open_mpi(hosts),
            Kind::Mpi => Command::new("mpirun"),
        };
        command.args(["-n", &count.to_string()]);
        if !hosts.is_empty() && self.kind != Kind::Slurm {
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

/// Returns `srun` of Slurm, which starts the processes in the order of the hosts, as `mpirun` does. By
/// itself, it would order the nodes, and spread the tasks over all of them. The user's own settings have
/// precedence.
fn srun(count: u32, hosts: &[Host]) -> Command {
    let mut command = Command::new("srun");
    if env::var_os("SLURM_MPI_TYPE").is_none() {
        command.arg("--mpi=pmix");
    }
    // A question to a host runs next to other steps of the allocation.
    command.args(["--kill-on-bad-exit=1", "--overlap"]);
    // A step has the processors per task of its allocation only if it asks for them.
    if let Ok(processors) = env::var("SLURM_CPUS_PER_TASK") {
        command.arg(format!("--cpus-per-task={processors}"));
    }
    let tasks = hosts.iter().flat_map(|host| std::iter::repeat_n(host.name.as_str(), host.slots as usize));
    let tasks: Vec<&str> = tasks.take(count as usize).collect();
    command.args(["--distribution=arbitrary".to_owned(), format!("--nodelist={}", tasks.join(","))]);
    // It is about the whole allocation.
    command.env_remove("SLURM_NTASKS_PER_NODE");
    command
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
