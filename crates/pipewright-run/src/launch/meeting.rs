//! A short trial before the first start: a process on each host joins the others. If they do not reach each other, the
//! launch tries each two hosts, and says which two do not and why, because a run that waits for its processes could not.

use std::io;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright::ids::WorldRank;

use crate::error::RunError;
use crate::fault::Start;
use crate::launch::hosts::Host;
use crate::launch::short_command::{Printed, wait};
use crate::launch::starter::Starter;
use crate::observer::Silent;
use crate::training::process_group::ProcessGroup;

/// The line of the first process when all have met.
const MET: &str = "all processes have met";

/// The longest time of a meeting.
const LONGEST: Duration = Duration::from_secs(60);

/// The most meetings at the same time. A server of `ssh` refuses more than ten connections that begin together.
const SIDE_BY_SIDE: usize = 8;

/// Joins the other processes of a meeting, and returns the line of this one, which is empty unless this is the first.
///
/// # Errors
/// Fails if the processes do not reach each other.
pub fn meet() -> Result<String, RunError> {
    let mut processes = ProcessGroup::gather(Arc::new(Silent))?;
    processes.set_deadline(LONGEST);
    let count = |all: &[(WorldRank, u32)]| all.len();
    processes.combine(&0, count, Duration::ZERO)?;
    let is_first = processes.is_leader();
    Ok(if is_first { format!("{MET}\n") } else { String::new() })
}

/// Lets a process on each host meet the others.
///
/// # Errors
/// Fails with every two hosts whose processes do not meet, and why.
pub(super) fn require(
    starter: &Starter,
    hosts: &[Host],
    is_stopped: impl Fn() -> bool,
) -> Result<(), RunError> {
    if hosts.len() < 2 {
        return Ok(());
    }
    let one_each: Vec<Host> = hosts.iter().map(|host| Host { slots: 1, ..host.clone() }).collect();
    let Some(all) = trials(starter, std::slice::from_ref(&one_each), &is_stopped).pop() else {
        return Ok(());
    };
    if all == Outcome::Met || is_stopped() {
        return Ok(());
    }
    let with_later = |(index, first): (usize, &Host)| {
        let first = first.clone();
        one_each[index + 1..].iter().map(move |second| vec![first.clone(), second.clone()])
    };
    let pairs: Vec<Vec<Host>> = one_each.iter().enumerate().flat_map(with_later).collect();
    let outcomes =
        if let [_] = &pairs[..] { vec![all.clone()] } else { in_groups(starter, &pairs, &is_stopped) };
    if is_stopped() {
        return Ok(());
    }
    let mut refusals: Vec<String> = pairs
        .iter()
        .zip(&outcomes)
        .filter_map(|(pair, outcome)| sentence(&pair[0].name, &pair[1].name, outcome))
        .collect();
    if refusals.is_empty() {
        let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
        let names = names.join(",");
        let said = match &all {
            Outcome::Ended(printed) => format!(": {}", printed.telling_line()),
            _ => String::new(),
        };
        refusals.push(format!(
            "each two of the hosts {names} reach each other, and all together do not{said}: `mpirun --host {names} hostname` \
             shows why"
        ));
    }
    Err(RunError::input(refusals.join("\n")))
}

/// How a trial ends.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// The processes have met.
    Met,
    /// Nothing has happened in time.
    Silent,
    /// `mpirun` cannot be started.
    NotStarted(String),
    /// `mpirun` has ended before the processes had met.
    Ended(Printed),
}

/// Tries groups of hosts, a few of them at the same time.
fn in_groups(starter: &Starter, groups: &[Vec<Host>], is_stopped: &impl Fn() -> bool) -> Vec<Outcome> {
    groups.chunks(SIDE_BY_SIDE).flat_map(|groups| trials(starter, groups, is_stopped)).collect()
}

/// Lets a process on each host of a group meet the others of the group. All groups have the same time. A group whose
/// `mpirun` has ended early tries once more: several of them that start at the same time may be in each other's way.
fn trials(starter: &Starter, groups: &[Vec<Host>], is_stopped: &impl Fn() -> bool) -> Vec<Outcome> {
    let mut outcomes = trial(starter, groups, is_stopped);
    for (hosts, outcome) in groups.iter().zip(&mut outcomes) {
        if matches!(outcome, Outcome::Ended(_)) && !is_stopped() {
            trial(starter, std::slice::from_ref(hosts), is_stopped)
                .into_iter()
                .for_each(|again| *outcome = again);
        }
    }
    outcomes
}

/// Lets each group try once.
fn trial(starter: &Starter, groups: &[Vec<Host>], is_stopped: &impl Fn() -> bool) -> Vec<Outcome> {
    let words = ["launch", "--meet"].map(str::to_owned);
    let begin = |hosts: &Vec<Host>| {
        let count = u32::try_from(hosts.len()).unwrap_or(u32::MAX);
        let mut command = starter.command(count, hosts, &words, &Start::default());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let children: Vec<io::Result<Child>> = groups.iter().map(begin).collect();
    let since = Instant::now();
    let outcome = |child: io::Result<Child>| match child {
        Err(error) => Outcome::NotStarted(error.to_string()),
        Ok(child) => match wait(child, || since.elapsed() > LONGEST || is_stopped()) {
            None => Outcome::Silent,
            Some(printed) if printed.stdout.lines().any(|line| line.trim() == MET) => Outcome::Met,
            Some(printed) => Outcome::Ended(printed),
        },
    };
    children.into_iter().map(outcome).collect()
}

/// A kind of failure, which the words of `mpirun` or of a process show.
struct Cause {
    signs: &'static [&'static str],
    /// The fault, and the advice. `{first}` and `{second}` are the hosts.
    advice: &'static str,
}

/// The advice if the processes of two hosts do not reach each other.
const NETWORK: &str = "a firewall between the two is in the way, or Open MPI uses a network that they do not share. With \
    `nc -l 5000` on {second}, `ssh {first} nc -zv {second} 5000` shows a firewall: let it accept TCP from the other host. `ip address` on both \
    shows their networks: name the common one, as in `OMPI_MCA_btl_tcp_if_include=192.168.1.0/24 \
    OMPI_MCA_oob_tcp_if_include=192.168.1.0/24 pipewright launch ...`";

/// The kinds of failures. The first one with a sign counts.
const CAUSES: [Cause; 5] = [
    Cause {
        signs: &[
            "Could not resolve hostname",
            "Name or service not known",
            "name resolution",
            "getaddrinfo",
            "gethostbyname",
        ],
        advice: "a name is not known on one of them: `getent hosts {first} {second}` on both shows it; use addresses in --hosts, or add the \
                 names to /etc/hosts",
    },
    Cause {
        signs: &[
            "error while loading shared libraries",
            "undefined symbol",
            "symbol lookup error",
            "version `",
            "Data unpack",
            "Pack data mismatch",
        ],
        advice: "their installations of MPI or of the system differ: `mpirun --version` and `ldd --version` on both show it; \
                 install the same versions",
    },
    Cause {
        signs: &["Illegal instruction"],
        advice: "this build uses instructions that a processor does not have: build without `-C target-cpu=native`",
    },
    Cause {
        signs: &["exited on signal", "Segmentation fault"],
        advice: "a process has ended by a signal: `dmesg` on both may say why",
    },
    Cause {
        signs: &[
            "Connection refused",
            "No route to host",
            "Network is unreachable",
            "Connection timed out",
            "unable to reach each other",
            "unable to complete a TCP connection",
            "failed to TCP connect",
            "address is unexpected",
        ],
        advice: NETWORK,
    },
];

/// Says why the processes of two hosts do not meet; `None` if they do.
fn sentence(first: &str, second: &str, outcome: &Outcome) -> Option<String> {
    let with_hosts = |advice: &str| advice.replace("{first}", first).replace("{second}", second);
    let shows = format!("`mpirun --host {first},{second} hostname`");
    Some(match outcome {
        Outcome::Met => return None,
        Outcome::Silent => format!(
            "the processes on {first} and {second} do not reach each other within {} s: {}",
            LONGEST.as_secs(),
            with_hosts(NETWORK)
        ),
        Outcome::NotStarted(reason) => {
            format!("the processes on {first} and {second} cannot be started: {reason}; {shows} shows it")
        }
        Outcome::Ended(printed) => {
            let found = CAUSES.iter().find_map(|cause| {
                let is_sign = |line: &&str| cause.signs.iter().any(|sign| line.contains(sign));
                printed.stderr.lines().find(is_sign).map(|line| (line.trim(), cause.advice))
            });
            match found {
                Some((line, advice)) => format!(
                    "the processes on {first} and {second} do not reach each other: {line}: {}",
                    with_hosts(advice)
                ),
                None => format!(
                    "the processes on {first} and {second} end before they meet: {}; {shows} may show why",
                    printed.telling_line()
                ),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(outcome: &Outcome, expected: &[&str]) {
        let found = sentence("a", "b", outcome).unwrap_or_default();
        assert!(expected.iter().all(|part| found.contains(part)), "{found}");
        let is_firewall = expected.iter().any(|part| part.contains("firewall"));
        assert_eq!(found.contains("firewall"), is_firewall, "{found}");
    }

    #[test]
    fn each_cause_has_its_own_advice() {
        let ended = |said: &str, expected: &[&str]| {
            let (is_success, stdout, stderr) = (false, String::new(), said.to_owned());
            check(&Outcome::Ended(Printed { is_success, stdout, stderr }), expected);
        };
        assert_eq!(sentence("a", "b", &Outcome::Met), None);
        let network = "a firewall between the two is in the way";
        check(
            &Outcome::Silent,
            &["a and b do not reach each other within 60 s", network, "`ssh a nc -zv b 5000`"],
        );
        check(&Outcome::NotStarted("no such file".to_owned()), &["cannot be started: no such file"]);
        ended(
            "-----\nMessage: connect() to 10.0.0.2 failed\nError: No route to host (113)\n",
            &["do not reach each other: Error: No route to host (113): ", network],
        );
        ended("connect: Connection refused", &["Connection refused", network]);
        ended(
            "ssh: Could not resolve hostname b: Name or service not known",
            &["a name is not known on one of them: `getent hosts a b`"],
        );
        ended("pw: error while loading shared libraries: libmpi.so.40: no file", &["libmpi.so.40", "differ"]);
        ended("pw: /lib/libc.so.6: version `GLIBC_2.38' not found", &["GLIBC_2.38", "differ"]);
        ended("rank 1 on node b exited on signal 4 (Illegal instruction).", &["target-cpu=native"]);
        ended("rank 1 on node b exited on signal 9 (Killed).", &["has ended by a signal"]);
        ended(
            "----\nerror: no such option\n----\nmpirun has found this\n",
            &["a and b end before they meet: error: no such option; `mpirun --host a,b hostname`"],
        );
        ended("----\nmpirun has found this\n", &["end before they meet: mpirun has found this"]);
        ended("", &["it prints nothing"]);
    }
}
