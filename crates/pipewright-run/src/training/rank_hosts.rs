//! The names of the hosts of a run, for ranks that have computed wrong bits.

use std::time::Duration;

use pipewright::verification::Verify;
use sysinfo::System;

use crate::error::RunError;
use crate::settings::Settings;
use crate::training::process_group::ProcessGroup;

/// The host of each rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankHosts(Vec<String>);

impl RankHosts {
    /// Finds the hosts if the run verifies steps. All processes call it.
    ///
    /// # Errors
    /// Fails if the processes do not reach each other.
    pub(crate) fn find(processes: &mut ProcessGroup, settings: &Settings) -> Result<Self, RunError> {
        if settings.run.verify == Verify::Off {
            return Ok(Self::default());
        }
        let names = |hosts: &[(_, String)]| hosts.iter().map(|(_, name)| name.clone()).collect();
        processes.combine(&host_name(), names, Duration::ZERO).map(Self)
    }

    /// Returns the hosts of ranks, each once. All ranks of one process are on its host.
    pub(crate) fn of(&self, ranks: &[u32]) -> Vec<String> {
        let host = |rank: &u32| self.0.get(*rank as usize).or(self.0.first()).filter(|name| !name.is_empty());
        let mut hosts: Vec<String> = Vec::new();
        for name in ranks.iter().filter_map(host) {
            if !hosts.contains(name) {
                hosts.push(name.clone());
            }
        }
        hosts
    }
}

/// Returns the name of this machine; empty if the system does not say it.
pub fn host_name() -> String {
    System::host_name().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_on_the_host_of_their_process() {
        let hosts = |names: &[&str], ranks: &[u32]| {
            RankHosts(names.iter().map(|name| (*name).to_owned()).collect()).of(ranks)
        };
        assert_eq!(hosts(&["a"], &[2, 3]), ["a"]);
        assert_eq!(hosts(&["a", "a", "b"], &[1, 2]), ["a", "b"]);
        assert_eq!(hosts(&["a", "b", "a"], &[0, 1, 2]), ["a", "b"]);
        assert!(hosts(&[""], &[0]).is_empty() && hosts(&[], &[0]).is_empty());
    }
}
