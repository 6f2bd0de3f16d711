//! [`CopyHosts`]: the hosts of a run, by the memory in which their processes keep copies of the state.

use std::path::Path;
use std::time::Duration;

use pipewright::ids::WorldRank;

use crate::error::RunError;
use crate::training::copies_link::memory_of;
use crate::training::process_group::ProcessGroup;

/// The hosts of the processes of a run. Processes that share a memory are on one host, and so a container
/// whose memory is its own counts as a host. A launcher starts processes in the order of its hosts, so hosts
/// are numbered by their first processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyHosts {
    /// The host of each process.
    host_of_rank: Vec<u32>,
    own: WorldRank,
}

impl CopyHosts {
    /// Finds the hosts, for copies below the folder that has `copies`. All processes call it.
    ///
    /// # Errors
    /// Fails if the processes do not reach each other.
    pub(crate) fn find(processes: &mut ProcessGroup, copies: &Path) -> Result<Self, RunError> {
        let own = memory_of(copies).unwrap_or_default();
        let host_of_rank = processes.combine(&own, number, Duration::ZERO)?;
        Ok(Self { host_of_rank, own: processes.rank() })
    }

    /// Returns the rank of this process.
    pub(crate) fn rank(&self) -> WorldRank {
        self.own
    }

    /// Returns the number of hosts.
    pub(crate) fn count(&self) -> usize {
        self.host_of_rank.iter().max().map_or(0, |last| *last as usize + 1)
    }

    /// Returns the host of a process.
    pub(crate) fn host_of(&self, rank: WorldRank) -> usize {
        self.host_of_rank.get(rank.get() as usize).map_or(0, |host| *host as usize)
    }

    /// Returns the host of this process.
    pub(crate) fn own(&self) -> usize {
        self.host_of(self.own)
    }

    /// Returns one of the processes of a host, so that the numbers `index` are spread evenly over them.
    pub(crate) fn process_on(&self, host: usize, index: usize) -> WorldRank {
        let ranks = self.processes_on(host);
        ranks.get(index % ranks.len().max(1)).copied().unwrap_or_default()
    }

    /// Returns whether this process is the first one of its host.
    pub(crate) fn is_first(&self) -> bool {
        self.process_on(self.own(), 0) == self.own
    }

    /// Returns the process of the next host that holds the copies of this process; `None` if there is one
    /// host.
    pub(crate) fn neighbour(&self) -> Option<WorldRank> {
        let next = (self.own() + 1) % self.count().max(1);
        let index = self.processes_on(self.own()).iter().position(|rank| *rank == self.own)?;
        (next != self.own()).then(|| self.process_on(next, index))
    }

    fn processes_on(&self, host: usize) -> Vec<WorldRank> {
        let ranks = (0..).map(WorldRank::new).zip(&self.host_of_rank);
        ranks.filter(|(_, found)| **found as usize == host).map(|(rank, _)| rank).collect()
    }
}

/// Returns the number of each process's host. A memory that is not known is a host of its own.
fn number(memories: &[(WorldRank, String)]) -> Vec<u32> {
    let mut known: Vec<&str> = Vec::new();
    let numbers = memories.iter().map(|(_, memory)| {
        let found = known.iter().position(|known| !memory.is_empty() && known == memory);
        let index = found.unwrap_or_else(|| {
            known.push(memory);
            known.len() - 1
        });
        u32::try_from(index).unwrap_or(u32::MAX)
    });
    numbers.collect()
}

#[cfg(test)]
impl CopyHosts {
    /// Returns hosts of processes, seen by one of them.
    pub(crate) fn of(host_of_rank: &[u32], own: u32) -> Self {
        Self { host_of_rank: host_of_rank.to_vec(), own: WorldRank::new(own) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_with_one_memory_are_on_one_host() {
        let check = |memories: &[&str], expected: &[u32]| {
            let memories: Vec<_> =
                (0..).map(WorldRank::new).zip(memories.iter().map(|memory| (*memory).to_owned())).collect();
            assert_eq!(number(&memories), expected);
        };
        check(&["a", "a", "b", "a"], &[0, 0, 1, 0]);
        check(&["", "", "b"], &[0, 1, 2]);
        check(&[], &[]);
    }

    /// Checks the neighbours of all processes.
    fn check_neighbours(host_of_rank: &[u32], expected: &[Option<u32>]) {
        let neighbours: Vec<Option<u32>> = (0..host_of_rank.len() as u32)
            .map(|own| CopyHosts::of(host_of_rank, own).neighbour().map(WorldRank::get))
            .collect();
        assert_eq!(neighbours, expected, "{host_of_rank:?}");
    }

    #[test]
    fn the_neighbour_is_a_process_of_the_next_host() {
        check_neighbours(&[0, 0, 1, 1], &[Some(2), Some(3), Some(0), Some(1)]);
        check_neighbours(&[0, 1, 2], &[Some(1), Some(2), Some(0)]);
        check_neighbours(&[0, 0, 0, 1], &[Some(3), Some(3), Some(3), Some(0)]);
        check_neighbours(&[0, 0], &[None, None]);
        check_neighbours(&[0], &[None]);
    }

    #[test]
    fn one_process_of_a_host_is_its_first() {
        let first = |own| CopyHosts::of(&[0, 1, 0, 1], own).is_first();
        assert_eq!([0, 1, 2, 3].map(first), [true, true, false, false]);
    }
}
