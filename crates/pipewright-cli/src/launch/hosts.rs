//! The hosts on which processes can be started, and how many each takes: from a hostfile, or from Slurm.

use std::env;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text};

use crate::failure::Failure;
use crate::launch::short_command::run;
use pipewright_run::training::rank_hosts::host_name;

/// The longest time in which Slurm names the hosts of an allocation.
const LONGEST_ANSWER: Duration = Duration::from_secs(60);

/// A host, and the number of processes that it takes. Its name becomes an argument of other programs, among them
/// `mpirun` and through it `ssh`, so a name that comes from outside is checked ([`Host::read`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) slots: u32,
}

impl Host {
    /// Reads a host by its name or address.
    ///
    /// # Errors
    /// Returns a sentence about a name that no host has. One that begins with `-` would be an option of the programs
    /// that get it, and one with a comma or a blank would be several hosts.
    pub(crate) fn read(name: &str, slots: u32) -> Result<Self, String> {
        if is_host_name(name) || is_address(name) {
            return Ok(Self { name: name.to_owned(), slots });
        }
        Err(format!(
            "`{}` is not the name of a host: a name has letters, digits, `.`, `-` and `_`, and begins with a letter, a digit or `_`",
            name.escape_debug()
        ))
    }
}

fn is_host_name(name: &str) -> bool {
    let is_right = |sign: char| sign.is_ascii_alphanumeric() || "._-".contains(sign);
    name.starts_with(|sign: char| sign.is_ascii_alphanumeric() || sign == '_') && name.chars().all(is_right)
}

/// Returns whether a text is an address of version 6, which may have brackets and the name of an interface.
fn is_address(text: &str) -> bool {
    let text = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let (address, interface) = text.split_once('%').unwrap_or((text, "_"));
    address.parse::<Ipv6Addr>().is_ok() && is_host_name(interface)
}

/// Where processes are started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Places {
    /// On this machine.
    Here,
    /// On the hosts of a file.
    Hosts(Vec<Host>),
    /// On the hosts of an allocation of Slurm.
    Slurm(Vec<Host>),
}

impl Places {
    /// Returns the hosts of the file; without one, the hosts of the allocation that this process is in, or
    /// this machine.
    pub(crate) fn find(hostfile: Option<&Path>, is_here: bool) -> Result<Self, Failure> {
        if let Some(path) = hostfile {
            let text = read_regular_text(path, SMALL_TEXT);
            let text =
                text.map_err(|error| Failure::input(format!("{}: cannot be read: {error}", path.display())))?;
            let hosts =
                read(&text).map_err(|mistake| Failure::input(format!("{}:{mistake}", path.display())))?;
            return Ok(Self::Hosts(hosts));
        }
        let nodes = env::var("SLURM_JOB_NODELIST").ok().filter(|_| !is_here);
        nodes.map_or(Ok(Self::Here), |nodes| Ok(Self::Slurm(of_slurm(&nodes)?)))
    }

    /// Returns the hosts; none for this machine alone.
    pub(crate) fn hosts(&self) -> &[Host] {
        match self {
            Self::Here => &[],
            Self::Hosts(hosts) | Self::Slurm(hosts) => hosts,
        }
    }

    /// Removes the hosts with these names. Returns whether another host is left; otherwise removes none.
    pub(super) fn leave_out(&mut self, names: &[String]) -> bool {
        let is_left = |host: &Host| !names.contains(&host.name);
        match self {
            Self::Hosts(hosts) | Self::Slurm(hosts) if hosts.iter().any(is_left) => {
                hosts.retain(is_left);
                true
            }
            _ => false,
        }
    }
}

/// Returns whether a host is this machine, as far as its name says so.
pub(super) fn is_this_machine(name: &str) -> bool {
    is_name_of(name, &host_name())
}

/// Returns whether a host's name is the one of the machine `own`, with or without a domain, or the one that
/// every machine has for itself.
fn is_name_of(name: &str, own: &str) -> bool {
    let label = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    let is_loopback = name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    name == "localhost" || is_loopback || (!own.is_empty() && label(name) == label(own))
}

/// Returns the names of the hosts of some ranks, each once. A launcher fills the slots of a host before it
/// starts processes on the next one.
pub(super) fn hosts_of(hosts: &[Host], ranks: &[u32]) -> Vec<String> {
    let slots = hosts.iter().flat_map(|host| std::iter::repeat_n(&host.name, host.slots as usize));
    let mut names: Vec<String> =
        (0..).zip(slots).filter(|(rank, _)| ranks.contains(rank)).map(|(_, name)| name.clone()).collect();
    names.dedup();
    names
}

/// Reads a hostfile: a host in each line, with `slots=N` if it takes several processes, and comments after
/// `#`.
fn read(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts: Vec<Host> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(name) = words.next() else { continue };
        let mut slots = 1;
        for word in words {
            let count =
                word.strip_prefix("slots=").and_then(|count| count.parse().ok()).filter(|count| *count > 0);
            slots = count
                .ok_or_else(|| format!("{number}: `{word}` is not understood: write `{name} slots=4`"))?;
        }
        if hosts.iter().any(|host| host.name == name) {
            return Err(format!(
                "{number}: the host `{name}` is in the file twice: write it once, with all its slots"
            ));
        }
        hosts.push(Host::read(name, slots).map_err(|mistake| format!("{number}: {mistake}"))?);
    }
    if hosts.is_empty() {
        Err("1: the file has no host: write a line such as `node1 slots=4`".to_owned())
    } else {
        Ok(hosts)
    }
}

/// Returns the hosts of an allocation, in Slurm's order.
fn of_slurm(nodes: &str) -> Result<Vec<Host>, Failure> {
    let failed = |reason: String| {
        Failure::input(format!(
            "the hosts of the allocation are not known: `scontrol show hostnames` {reason}"
        ))
    };
    if nodes.starts_with('-') {
        return Err(Failure::input(format!(
            "SLURM_JOB_NODELIST={nodes}: this is not a list of nodes; name the hosts in a file (--hosts)"
        )));
    }
    let printed = run(Command::new("scontrol").args(["show", "hostnames", nodes]), LONGEST_ANSWER, || false);
    let printed = printed.map_err(|error| failed(format!("cannot be run: {error}")))?;
    let names = printed.stdout;
    if !printed.is_success {
        return Err(failed(printed.stderr.trim().to_owned()));
    }
    let tasks = env::var("SLURM_TASKS_PER_NODE").unwrap_or_default();
    let slots = slots_of_slurm(&tasks).ok_or_else(|| {
        Failure::input(format!(
            "SLURM_TASKS_PER_NODE={tasks}: not understood; name the hosts in a file (--hosts)"
        ))
    })?;
    let slots = slots.into_iter().chain(std::iter::repeat(1));
    let hosts = names.lines().zip(slots).map(|(name, slots)| Host::read(name, slots));
    let hosts = hosts
        .collect::<Result<Vec<Host>, String>>()
        .map_err(|mistake| failed(format!("says that {mistake}")))?;
    if hosts.is_empty() { Err(failed(format!("names none of `{nodes}`"))) } else { Ok(hosts) }
}

/// Reads the numbers of tasks of all nodes, such as `4(x2),3`.
fn slots_of_slurm(text: &str) -> Option<Vec<u32>> {
    let mut slots = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        slots.extend(std::iter::repeat_n(count.parse::<u32>().ok()?, times));
    }
    Some(slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostfile_has_hosts_with_slots() {
        let host = |name: &str, slots| Host { name: name.to_owned(), slots };
        assert_eq!(
            read("# all\nnode1 slots=4\n\nnode2 # spare\n"),
            Ok(vec![host("node1", 4), host("node2", 1)])
        );
        let refuse = |text: &str, expected: &str| assert_eq!(read(text).err().as_deref(), Some(expected));
        refuse("a\na slots=2", "2: the host `a` is in the file twice: write it once, with all its slots");
        refuse("a slots=0", "1: `slots=0` is not understood: write `a slots=4`");
        refuse("# none\n", "1: the file has no host: write a line such as `node1 slots=4`");
    }

    #[test]
    fn a_name_that_is_no_host_is_refused_before_a_program_gets_it() {
        let right = ["node1", "node1.lab", "10.0.0.1", "fe80::1%eth0", "[::1]", "::1", "_x-1", "n_1"];
        for name in right {
            assert_eq!(Host::read(name, 1).map(|host| host.name), Ok(name.to_owned()));
        }
        let wrong = [
            "-oProxyCommand=touch",
            "--help",
            "-",
            "",
            "a b",
            "a\tb",
            "a,b",
            "a\u{0}",
            "a\n",
            "a;b",
            "$(a)",
            "`a`",
            "a'",
            "a\"",
            "a|b",
            "a/b",
            "\u{a0}",
            "n\u{f6}de",
            "u@a",
            ".",
            "%a",
            "a=b",
            "a\u{200b}",
            "a:4",
            "[a]",
            "::1%",
            "::1%-a",
            "[]",
        ];
        for name in wrong {
            assert!(Host::read(name, 1).is_err(), "{name}");
        }
        let refuse = |text: &str, expected: &str| {
            let mistake = read(text).expect_err("it is not a host");
            assert!(mistake.starts_with(expected), "{mistake}");
        };
        refuse("a\n-oProxyCommand=x slots=2", "2: `-oProxyCommand=x` is not the name of a host: ");
        refuse("a,b", "1: `a,b` is not the name of a host: ");
        refuse("\u{feff}a", "1: `\\u{feff}a` is not the name of a host: ");
    }

    #[test]
    fn this_machine_has_several_names() {
        let is_own = |name| is_name_of(name, "node1.lab");
        assert!(["node1", "node1.lab", "localhost", "127.0.0.1", "::1"].into_iter().all(is_own));
        assert!(!["node2", "node1b.lab", "10.0.0.1"].into_iter().any(is_own));
        assert!(!is_name_of(".lab", ""));
    }

    #[test]
    fn ranks_fill_one_host_after_the_other() {
        let hosts = [("a", 2), ("b", 1), ("c", 3)].map(|(name, slots)| Host { name: name.to_owned(), slots });
        let check = |ranks: &[u32], expected: &[&str]| assert_eq!(hosts_of(&hosts, ranks), expected);
        check(&[1], &["a"]);
        check(&[2], &["b"]);
        check(&[1, 2], &["a", "b"]);
        check(&[4, 5], &["c"]);
        check(&[6], &[]);
    }

    #[test]
    fn slurm_states_tasks_by_node() {
        assert_eq!(slots_of_slurm("4(x2),3"), Some(vec![4, 4, 3]));
        assert_eq!(slots_of_slurm("2"), Some(vec![2]));
        assert_eq!(slots_of_slurm("four"), None);
    }
}
