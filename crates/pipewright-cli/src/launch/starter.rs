//! [`Starter`]: the program that starts processes, and its arguments.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::failure::Failure;
use crate::fault::LAUNCHED;
use crate::launch::hosts::{Host, Places};

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
        let binary = std::env::current_exe()
            .map_err(|error| Failure::input(format!("the path of this program is not known: {error}")))?;
        let (program, advice) = if matches!(places, Places::Slurm(_)) {
            ("srun", "it belongs to Slurm, and must be in PATH")
        } else {
            ("mpirun", "on Debian: apt-get install openmpi-bin")
        };
        let version = Command::new(program).arg("--version").stdin(Stdio::null()).output();
        let version = version
            .map_err(|error| Failure::input(format!("`{program}` cannot be started: {error}; {advice}")))?;
        let is_open = String::from_utf8_lossy(&version.stdout).contains("Open MPI");
        let kind = match (program, is_open) {
            ("srun", _) => Kind::Slurm,
            (_, true) => Kind::OpenMpi,
            (_, false) => Kind::Mpi,
        };
        Ok(Self { kind, binary })
    }

    /// Returns the command that starts `count` processes of this binary with the arguments `words`, on the
    /// hosts in their order, or on this machine if there are none. The processes learn the number of the
    /// `restart`, which is 0 before the first one.
    pub(crate) fn command(&self, count: u32, hosts: &[Host], words: &[String], restart: u64) -> Command {
        let mut command = match self.kind {
            Kind::Slurm => self.srun(hosts),
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
        command.env(LAUNCHED, restart.to_string()).arg(&self.binary).args(words).stdin(Stdio::null());
        command
    }

    fn srun(&self, hosts: &[Host]) -> Command {
        let mut command = Command::new("srun");
        // A question to a host runs next to other steps of the allocation.
        command.args(["--mpi=pmix", "--kill-on-bad-exit=1", "--overlap"]);
        if !hosts.is_empty() {
            let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
            command.args([format!("--nodes={}", hosts.len()), format!("--nodelist={}", names.join(","))]);
        }
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
        ]);
    }
    set.extend([
        ("OMPI_MCA_hwloc_base_binding_policy", "none"),
        ("PRTE_MCA_hwloc_default_binding_policy", "none"),
    ]);
    command.envs(set.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(kind: Kind, expected: &str) {
        let starter = Starter { kind, binary: "/bin/pipewright".into() };
        let hosts = [("a", 2), ("b", 1)].map(|(name, slots)| Host { name: name.to_owned(), slots });
        let command = starter.command(3, &hosts, &["train".to_owned()], 2);
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
            "--mpi=pmix --kill-on-bad-exit=1 --overlap --nodes=2 --nodelist=a,b -n 3 /bin/pipewright train",
        );
    }
}
