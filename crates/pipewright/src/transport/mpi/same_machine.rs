//! The processes of this run on this machine. If one ends, the others find out without waiting for the
//! deadline.

use std::path::Path;

use crate::ids::WorldRank;
use crate::transport::wire::ProcessId;

/// The processes that this one can observe.
pub(super) struct LocalProcesses {
    own: ProcessId,
    seen: Vec<(WorldRank, u32)>,
}

impl LocalProcesses {
    /// Returns an empty list; [`LocalProcesses::add`] adds processes.
    pub(super) fn new() -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        // Containers of one machine may not see each other's processes.
        let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let machine = format!("{} {}", boot.trim(), space.display());
        Self { own: ProcessId { machine, number: std::process::id() }, seen: Vec::new() }
    }

    /// Returns this process.
    pub(super) fn own(&self) -> ProcessId {
        self.own.clone()
    }

    /// Records the process of a rank.
    pub(super) fn add(&mut self, rank: WorldRank, process: &ProcessId) {
        if process.machine == self.own.machine && is_running(process.number) {
            self.seen.push((rank, process.number));
        }
    }

    /// Returns a rank whose process has ended.
    pub(super) fn ended(&self) -> Option<WorldRank> {
        self.seen.iter().find(|(_, number)| !is_running(*number)).map(|(rank, _)| *rank)
    }
}

/// Returns whether a process of that number is running; `true` if the system does not say.
fn is_running(number: u32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{number}/stat")) else {
        return !Path::new("/proc/self/stat").exists();
    };
    // The state follows the name, which is in parentheses and may contain anything; `Z` is a process that has
    // ended and whose parent has not collected its status.
    status.rsplit_once(')').is_none_or(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_ends_is_missed() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat is everywhere");
        let mut processes = LocalProcesses::new();
        let process = ProcessId { number: child.id(), ..processes.own() };
        processes.add(WorldRank::new(1), &process);
        assert_eq!(processes.ended(), None);
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        assert_eq!(processes.ended(), Some(WorldRank::new(1)));
    }

    #[test]
    fn processes_of_other_machines_are_not_looked_for() {
        let mut processes = LocalProcesses::new();
        processes.add(WorldRank::new(1), &ProcessId { machine: "elsewhere".to_owned(), number: u32::MAX });
        assert_eq!(processes.ended(), None);
    }
}
