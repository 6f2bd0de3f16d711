//! The memory of this machine that the process may use, and what it can still allocate.

use sysinfo::{Process, ProcessRefreshKind, ProcessesToUpdate, System};

/// The address space that the program's code, libraries and stacks take, which its resident memory does not
/// contain.
const MAPPED: u64 = 96 << 20;

/// Returns the memory that this process may use, in bytes: the memory of the machine, or the limit of its
/// control group.
pub fn machine_bytes() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    let process_limits = sysinfo::get_current_pid().ok().and_then(|pid| {
        system.refresh_processes_specifics(
            ProcessesToUpdate::Some(&[pid]),
            false,
            ProcessRefreshKind::nothing(),
        );
        system.process(pid)?.cgroup_limits()
    });
    let limits = [process_limits, system.cgroup_limits()].into_iter().flatten();
    let limits = limits.map(|limits| limits.total_memory);
    limits.chain([system.total_memory()]).filter(|bytes| *bytes > 0).min()
}

/// Returns the bytes that this process can have: the memory that it may use, and the machine's swap space.
pub fn most_bytes() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    Some(machine_bytes()?.saturating_add(system.total_swap()))
}

/// An amount of memory, and what limits it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeMemory {
    /// The bytes.
    pub bytes: u64,
    /// The whole memory that contains it.
    pub limit: &'static str,
}

/// Returns the smallest amount that the machine, the control group and the limit of the address space
/// (`ulimit -v`) leave; `None` if none of them is known. The machine's free swap space counts.
pub fn free_memory() -> Option<FreeMemory> {
    least(System::free_swap)
}

/// Like [`free_memory`], but without swap space.
pub fn unswapped_memory() -> Option<FreeMemory> {
    least(|_| 0)
}

fn least(swap: fn(&System) -> u64) -> Option<FreeMemory> {
    let mut system = System::new();
    system.refresh_memory();
    let own = sysinfo::get_current_pid().ok();
    if let Some(pid) = own {
        let what = ProcessRefreshKind::nothing().with_memory();
        system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, what);
    }
    let process = own.and_then(|pid| system.process(pid));
    let group = process.and_then(Process::cgroup_limits).or(system.cgroup_limits());
    let resident = process.map_or(0, Process::memory);
    let space = address_space().map(|limit| limit.saturating_sub(resident + MAPPED));
    let machine = Some(system.available_memory()).filter(|bytes| *bytes > 0);
    let machine = machine.map(|bytes| bytes.saturating_add(swap(&system)));
    [
        (machine, "the machine's memory"),
        (group.map(|group| group.free_memory), "the memory of the control group"),
        (space, "the address space (`ulimit -v`)"),
    ]
    .into_iter()
    .filter_map(|(bytes, limit)| Some(FreeMemory { bytes: bytes?, limit }))
    .min_by_key(|free| free.bytes)
}

/// Returns the limit of the address space, if there is one.
#[cfg(unix)]
fn address_space() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::As).current
}

#[cfg(not(unix))]
fn address_space() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory() {
        assert!(machine_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
