//! A short trial before the first start: a process on each host joins the others. If they do not reach each other, the
//! launch tries each two hosts, and says which two, because a run that waits for its processes could not.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright::ids::WorldRank;

use crate::error::RunError;
use crate::fault::Start;
use crate::launch::hosts::Host;
use crate::launch::short_command::wait;
use crate::launch::starter::Starter;
use crate::observer::Silent;
use crate::training::process_group::ProcessGroup;

/// The line of the first process when all have met.
const MET: &str = "all processes have met";

/// The longest time of a meeting.
const LONGEST: Duration = Duration::from_secs(30);

/// Joins the other processes of a meeting, and returns the line of this one, which is empty in all but the first.
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
/// Fails with every two hosts whose processes do not reach each other.
pub(super) fn require(
    starter: &Starter,
    hosts: &[Host],
    is_stopped: impl Fn() -> bool,
) -> Result<(), RunError> {
    let one_each: Vec<Host> = hosts.iter().map(|host| Host { slots: 1, ..host.clone() }).collect();
    if hosts.len() < 2 || meets(starter, &one_each, &is_stopped) || is_stopped() {
        return Ok(());
    }
    let mut refusals = Vec::new();
    for (index, first) in one_each.iter().enumerate() {
        for second in &one_each[index + 1..] {
            let pair = [first.clone(), second.clone()];
            if !is_stopped() && !meets(starter, &pair, &is_stopped) {
                refusals.push(sentence(&first.name, &second.name));
            }
        }
    }
    if is_stopped() {
        return Ok(());
    }
    if refusals.is_empty() {
        let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
        let names = names.join(",");
        refusals.push(format!(
            "each two of the hosts {names} reach each other, and all together do not: `mpirun --host {names} hostname` shows why"
        ));
    }
    Err(RunError::input(refusals.join("\n")))
}

/// Returns whether a process on each of these hosts meets the others in time.
fn meets(starter: &Starter, hosts: &[Host], is_stopped: &impl Fn() -> bool) -> bool {
    let count = u32::try_from(hosts.len()).unwrap_or(u32::MAX);
    let words = ["launch", "--meet"].map(str::to_owned);
    let mut command = starter.command(count, hosts, &words, &Start::default());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let since = Instant::now();
    let printed = child.ok().and_then(|child| wait(child, || since.elapsed() > LONGEST || is_stopped()));
    printed.is_some_and(|printed| printed.stdout.lines().any(|line| line.trim() == MET))
}

/// Says that the processes of two hosts do not reach each other.
fn sentence(first: &str, second: &str) -> String {
    format!(
        "the processes on {first} and {second} do not reach each other within {} s: a firewall between the two is in the way, or \
         Open MPI uses a network that they do not share. With `nc -l 5000` on {second}, `ssh {first} nc -zv {second} 5000` shows \
         a firewall: let it accept TCP from the other host. `ip address` on both shows their networks: name the common one, as \
         in `OMPI_MCA_btl_tcp_if_include=192.168.1.0/24 OMPI_MCA_oob_tcp_if_include=192.168.1.0/24 pipewright launch ...`",
        LONGEST.as_secs()
    )
}
