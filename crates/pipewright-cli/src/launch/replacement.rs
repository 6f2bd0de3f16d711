//! [`Replacement`]: the hosts of slow ranks, which other hosts can replace.

use crate::failure::{Exit, Failure};
use crate::launch::hosts::{Host, hosts_of};
use pipewright_run::fault::Fault;
use pipewright_run::recovery::SlowRank;

/// Slow ranks, and their hosts, which other hosts can replace.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Replacement {
    slow: Vec<SlowRank>,
    /// The hosts of the ranks and of the ranks that compute with them.
    pub(super) hosts: Vec<String>,
}

impl Replacement {
    /// Returns the hosts of slow ranks without which the run can do: the hosts of `all` but these and those
    /// that were `slow` before take all `processes`. If the slots do not suffice for all ranks, the first
    /// ones are replaced. `used` are the hosts of the processes. Returns `None` if no host can be replaced.
    pub(super) fn of(
        ranks: &[SlowRank],
        used: &[Host],
        all: &[Host],
        slow: &[String],
        processes: u32,
    ) -> Option<Self> {
        let mut chosen = Self::default();
        for rank in ranks {
            let own = hosts_of(used, &rank.ranks);
            let mut hosts = chosen.hosts.clone();
            hosts.extend(own.iter().filter(|host| !chosen.hosts.contains(host)).cloned());
            let others = all.iter().filter(|host| !hosts.contains(&host.name) && !slow.contains(&host.name));
            let slots = others.map(|host| host.slots).fold(0, u32::saturating_add);
            if !own.is_empty() && slots >= processes {
                chosen.slow.push(rank.clone());
                chosen.hosts = hosts;
            }
        }
        (!chosen.slow.is_empty()).then_some(chosen)
    }

    /// Returns the failure after which the run is restarted on other hosts.
    pub(super) fn failure(&self) -> Failure {
        let causes: Vec<String> = self.slow.iter().map(SlowRank::sentence).collect();
        let (cause, hosts) = (causes.join("; "), self.hosts.join(" and "));
        let summary = if self.hosts.len() == 1 {
            format!("{cause}; its host {hosts} becomes a spare host")
        } else {
            format!("{cause}; the hosts {hosts} become spare hosts")
        };
        let first = self.slow.first();
        let (step, rank) =
            (first.map_or(0, |slow| slow.step), first.and_then(|slow| slow.ranks.first().copied()));
        let fault = Fault { step, rank, cause, summary: summary.clone(), ..Fault::default() };
        Failure::new(Exit::RankFailed, summary).with_fault(Some(fault))
    }
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::Rank;
    use pipewright_schedule::slow_ranks::SpeedChange;

    use super::*;

    fn slow_rank(rank: u32) -> SlowRank {
        let change = SpeedChange { rank: Rank::new(rank), is_slow: true, slowdown: 3.0 };
        SlowRank::after(12, &change, 1)
    }

    /// Checks which hosts are replaced if the `ranks` are slow in a run of three processes on the hosts `a`
    /// and `b`. Hosts are letters.
    fn check(ranks: &[u32], all: &str, slow: &str, expected: &str) {
        let names = |letters: &str| letters.chars().map(String::from).collect::<Vec<_>>();
        let all: Vec<Host> = names(all).into_iter().map(|name| Host { name, slots: 2 }).collect();
        let ranks: Vec<SlowRank> = ranks.iter().copied().map(slow_rank).collect();
        let used = ["a", "b"].map(|name| Host { name: name.to_owned(), slots: 2 });
        let replacement = Replacement::of(&ranks, &used, &all, &names(slow), 3);
        assert_eq!(replacement.map(|replacement| replacement.hosts.concat()).unwrap_or_default(), expected);
    }

    #[test]
    fn hosts_are_replaced_if_the_others_take_all_processes() {
        check(&[2], "abcd", "", "b");
        check(&[0], "abcd", "c", "a");
        check(&[0], "abcd", "cd", "");
        check(&[0], "ab", "", "");
        check(&[0], "", "", "");
    }

    #[test]
    fn several_slow_hosts_are_replaced_together_if_there_are_enough_others() {
        check(&[0, 2], "abcd", "", "ab");
        check(&[0, 2], "abc", "", "a");
        check(&[0, 1], "abc", "", "a");
    }

    #[test]
    fn a_replacement_says_which_hosts_are_slow() {
        let summary = |hosts: &[&str]| {
            let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
            let failure = Replacement { slow: vec![slow_rank(2)], hosts }.failure();
            failure.fault().expect("a fault").summary.clone()
        };
        let one = summary(&["b"]);
        assert!(one.starts_with("step 12: rank 2 is slow: "), "{one}");
        assert!(one.ends_with("; its host b becomes a spare host"), "{one}");
        let two = summary(&["a", "b"]);
        assert!(two.ends_with("; the hosts a and b become spare hosts"), "{two}");
    }
}
