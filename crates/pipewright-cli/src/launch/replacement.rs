//! [`Replacement`]: the hosts of a slow rank, which other hosts can replace.

use crate::failure::{Exit, Failure};
use crate::fault::Fault;
use crate::launch::hosts::{Host, Places, hosts_of};
use crate::recovery::SlowRank;

/// A slow rank, and the hosts that other hosts can replace.
#[derive(Debug, PartialEq)]
pub(super) struct Replacement {
    slow: SlowRank,
    /// The hosts of the rank and of the ranks that compute with it.
    pub(super) hosts: Vec<String>,
}

impl Replacement {
    /// Returns the hosts of a slow rank if the run can do without them: all hosts of the hostfile but these and
    /// those that were `slow` before take all `processes`. `used` are the hosts of the processes.
    ///
    /// In an allocation of Slurm it is not known which rank is on which host.
    pub(super) fn of(
        rank: SlowRank,
        used: &[Host],
        places: &Places,
        slow: &[String],
        processes: u32,
    ) -> Option<Self> {
        let Places::Hosts(all) = places else { return None };
        let hosts = hosts_of(used, &rank.ranks);
        let others = all.iter().filter(|host| !hosts.contains(&host.name) && !slow.contains(&host.name));
        let slots = others.map(|host| host.slots).fold(0, u32::saturating_add);
        (!hosts.is_empty() && slots >= processes).then_some(Self { slow: rank, hosts })
    }

    /// Returns the failure after which the run is restarted on other hosts.
    pub(super) fn failure(&self) -> Failure {
        let (cause, hosts) = (self.slow.sentence(), self.hosts.join(" and "));
        let summary = format!("{cause}; its host {hosts} becomes a spare host");
        let rank = self.slow.ranks.first().copied();
        let fault = Fault { step: self.slow.step, rank, cause, summary: summary.clone(), space: None };
        Failure::new(Exit::RankFailed, summary).with_fault(Some(fault))
    }
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::Rank;
    use pipewright_schedule::slow_ranks::SpeedChange;

    use super::*;

    /// Returns the hosts that are replaced if the rank is slow in a run of three processes on the hosts `a` and
    /// `b` of the places.
    fn check(rank: u32, places: &Places, slow: &[&str]) -> Option<Vec<String>> {
        let used = [host("a"), host("b")];
        let change = SpeedChange { rank: Rank::new(rank), is_slow: true, slowdown: 3.0 };
        let slow: Vec<String> = slow.iter().map(|name| (*name).to_owned()).collect();
        let replacement = Replacement::of(SlowRank::after(12, &change, 1), &used, places, &slow, 3);
        replacement.map(|replacement| replacement.hosts)
    }

    fn host(name: &str) -> Host {
        Host { name: name.to_owned(), slots: 2 }
    }

    #[test]
    fn a_host_is_replaced_if_the_others_take_all_processes() {
        let hosts = ["a", "b", "c", "d"].map(host).to_vec();
        let of_file = Places::Hosts(hosts.clone());
        assert_eq!(check(2, &of_file, &[]), Some(vec!["b".to_owned()]));
        assert_eq!(check(0, &of_file, &["c"]), Some(vec!["a".to_owned()]));
        assert_eq!(check(0, &of_file, &["c", "d"]), None, "two slots are left");
        assert_eq!(check(0, &Places::Hosts(hosts[..2].to_vec()), &[]), None, "no host is spare");
        assert_eq!(check(0, &Places::Slurm(hosts), &[]), None);
        assert_eq!(check(0, &Places::Here, &[]), None);
    }

    #[test]
    fn a_replacement_says_which_host_is_slow() {
        let change = SpeedChange { rank: Rank::new(2), is_slow: true, slowdown: 3.0 };
        let slow = SlowRank::after(12, &change, 1);
        let failure = Replacement { slow, hosts: vec!["b".to_owned()] }.failure();
        let summary = &failure.fault().expect("a fault").summary;
        assert!(summary.starts_with("step 12: rank 2 is slow: "), "{summary}");
        assert!(summary.ends_with("; its host b becomes a spare host"), "{summary}");
    }
}
