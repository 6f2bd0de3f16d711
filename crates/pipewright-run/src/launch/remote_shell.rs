//! [`RemoteShell`]: the program that runs commands on other hosts, `ssh` or the one in the settings of `mpirun`, and why it
//! fails.

use std::env;
use std::process::Command;

use crate::launch::short_command::Printed;

/// The variables that name the program for `mpirun`: Open MPI 4 and 5, and MPICH.
const AGENTS: [&str; 4] =
    ["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC"];

/// The seconds that `ssh` waits for a connection.
const CONNECT: &str = "ConnectTimeout=10";

/// A program that runs commands on other hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteShell {
    words: Vec<String>,
}

impl RemoteShell {
    /// Returns the program that `mpirun` uses.
    pub(super) fn of_environment() -> Self {
        let agent = AGENTS.into_iter().find_map(|name| env::var(name).ok());
        Self::of(agent.as_deref().unwrap_or_default())
    }

    /// Reads an agent, such as `ssh -p 2222 : rsh`. The first one counts.
    fn of(agent: &str) -> Self {
        let first = agent.split(':').next().unwrap_or_default();
        let words: Vec<String> = first.split_whitespace().map(str::to_owned).collect();
        Self { words: if words.is_empty() { vec!["ssh".to_owned()] } else { words } }
    }

    /// Returns the name of the program.
    pub(super) fn program(&self) -> &str {
        &self.words[0]
    }

    /// Returns the command that runs a line of `sh` on a host. It asks no questions. The line has no `'`.
    pub(super) fn command(&self, host: &str, line: &str) -> Command {
        let mut command = Command::new(self.program());
        command.args(&self.words[1..]);
        if self.program().rsplit('/').next() == Some("ssh") {
            // Without a terminal, a question of `ssh` could not be answered.
            command.args(["-x", "-o", "BatchMode=yes", "-o", CONNECT]);
        }
        command.arg(host).arg(format!("sh -c '{line}'"));
        command
    }

    /// Returns why a command on a host has failed, with the command that shows it. `None` for the output means that it has
    /// not ended in time.
    pub(super) fn explain(&self, host: &str, printed: Option<&Printed>) -> String {
        let ssh = self.words.join(" ");
        let Some(printed) = printed else {
            return format!(
                "the host {host} does not answer in time: `{ssh} {host} true` shows it; check that the machine runs, and that \
                 no firewall between the two is in the way"
            );
        };
        let said = printed.stderr.trim();
        let has = |part: &str| said.contains(part);
        if has("Permission denied") || has("Too many authentication failures") {
            return format!(
                "the host {host} asks for a password: `{ssh} {host} true` shows it; let it accept your key: \
                 `ssh-keygen -t ed25519` once, then `ssh-copy-id {host}`"
            );
        }
        if has("Host key verification failed") {
            return format!(
                "the key of the host {host} is not known, or is another one than before: run `{ssh} {host} true` once and answer \
                 its question; after a new installation of the host, run `ssh-keygen -R {host}` first"
            );
        }
        if has("Could not resolve hostname") || has("Name or service not known") {
            return format!(
                "no machine has the name {host}: `getent hosts {host}` shows it; write its address (`ip address` on that \
                 machine), or add the name to /etc/hosts"
            );
        }
        if has("Connection refused") {
            return format!(
                "the host {host} has no ssh server, or a firewall refuses the connection: `nc -zv {host} 22` shows it; on \
                 that host: `apt-get install openssh-server`"
            );
        }
        if has("timed out") || has("No route to host") || has("Network is unreachable") {
            return format!(
                "the host {host} cannot be reached: `ping -c 3 {host}` shows it; check that the machine runs, that both are in \
                 one network, and that no firewall is in the way"
            );
        }
        let last = said.lines().last().unwrap_or("it prints nothing");
        format!("no command can be run on the host {host}: `{ssh} {host} true` shows why: {last}")
    }

    /// Returns the sentence about a program that is missing on this machine.
    pub(super) fn missing(&self) -> String {
        format!("`{}` is missing on this machine: on Debian: apt-get install openssh-client", self.program())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_of_mpirun_is_used() {
        let line = |agent: &str| {
            let command = RemoteShell::of(agent).command("a", "true");
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        let ssh = "-x -o BatchMode=yes -o ConnectTimeout=10 a sh -c 'true'";
        assert_eq!(line(""), format!("ssh {ssh}"));
        assert_eq!(line("ssh : rsh"), format!("ssh {ssh}"));
        assert_eq!(line("/usr/bin/ssh -p 22"), format!("/usr/bin/ssh -p 22 {ssh}"));
        assert_eq!(line("/tmp/shell"), "/tmp/shell a sh -c 'true'");
    }

    #[test]
    fn each_failure_has_the_command_that_shows_it() {
        let check = |stderr: &str, expected: [&str; 2]| {
            let printed = Printed { is_success: false, stdout: String::new(), stderr: stderr.to_owned() };
            let found = RemoteShell::of("").explain("b", Some(&printed));
            assert!(expected.iter().all(|part| found.contains(part)), "{found}");
        };
        check("me@b: Permission denied (publickey,password).", ["asks for a password", "ssh-copy-id b"]);
        check("Host key verification failed.", ["is not known", "ssh-keygen -R b"]);
        check("ssh: Could not resolve hostname b: x", ["no machine has the name b", "getent hosts b"]);
        check("ssh: connect to host b port 22: Connection refused", ["no ssh server", "nc -zv b 22"]);
        check("ssh: connect to host b port 22: Connection timed out", ["cannot be reached", "ping -c 3 b"]);
        check("ssh: connect to host b port 22: No route to host", ["cannot be reached", "ping -c 3 b"]);
        check("something\nelse\n", ["`ssh b true` shows why: else", "on the host b"]);
        check("", ["it prints nothing", "host b"]);
        assert!(RemoteShell::of("").explain("b", None).contains("does not answer in time"));
    }
}
