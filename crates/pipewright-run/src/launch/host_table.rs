//! [`HostTable`]: the hosts of a launch, and which of them the next attempt uses. It asks no host and reads no clock.
//!
//! - A host of a slow rank is used only if the others do not suffice.
//! - A host of a rank that has computed wrong bits is not used again.
//! - A host that was lost may come and go. After its first loss, the run uses it again as soon as it answers. After the
//!   second one, it is left out for a minute although it answers, and after each further loss for twice as long, at most
//!   a day. If an hour has passed since that time, the earlier losses no longer count.

use std::time::Duration;

use crate::error::{ErrorKind, FailedRun, RunError};
use crate::fault::Fault;
use crate::launch::hosts::Host;
use crate::recovery::SlowRank;

/// The time for which a host is left out after its second loss.
const FIRST: Duration = Duration::from_secs(60);
/// The longest time.
const LONGEST: Duration = Duration::from_secs(86_400);
/// The time between two losses after which the earlier one no longer counts.
const FORGOTTEN: Duration = Duration::from_secs(3600);

/// The hosts of a launch; none if the processes run on this machine.
#[derive(Debug, Default)]
pub(super) struct HostTable {
    hosts: Vec<Host>,
    /// The hosts of slow ranks.
    slow: Vec<String>,
    lost: Vec<LostHost>,
}

#[derive(Debug)]
struct LostHost {
    name: String,
    losses: u32,
    /// The time until which the host is left out.
    until: Duration,
}

/// Slow ranks whose hosts are replaced.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Replacement {
    slow: Vec<SlowRank>,
    /// The hosts of the ranks and of the ranks that compute with them.
    pub(super) hosts: Vec<String>,
}

impl HostTable {
    pub(super) fn new(hosts: Vec<Host>) -> Self {
        Self { hosts, ..Self::default() }
    }

    /// Returns all hosts.
    pub(super) fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Notes the hosts of slow ranks.
    pub(super) fn note_slow(&mut self, names: &[String]) {
        self.slow.extend_from_slice(names);
    }

    /// Notes that the run has lost these hosts, which it used.
    pub(super) fn note_lost(&mut self, names: &[String], now: Duration) {
        for name in names {
            let index = self.lost.iter().position(|host| host.name == *name).unwrap_or_else(|| {
                self.lost.push(LostHost { name: name.clone(), losses: 0, until: now });
                self.lost.len() - 1
            });
            let host = &mut self.lost[index];
            if now.saturating_sub(host.until) >= FORGOTTEN {
                host.losses = 0;
            }
            host.losses += 1;
            let time = match host.losses.checked_sub(2) {
                None => Duration::ZERO,
                Some(doublings) => FIRST.saturating_mul(2_u32.saturating_pow(doublings)).min(LONGEST),
            };
            host.until = now + time;
        }
    }

    /// Takes the hosts of the ranks that have computed wrong bits from the table, and adds their names to the failure.
    /// `used` are the hosts of the processes. Returns another failure as it is.
    ///
    /// # Errors
    /// Returns the failure, after which the run is not restarted, if no host would be left.
    pub(super) fn leave_out_wrong(&mut self, failure: RunError, used: &[Host]) -> Result<RunError, RunError> {
        let Some(fault) = failure.fault().filter(|fault| !fault.wrong_ranks.is_empty()) else {
            return Ok(failure);
        };
        let wrong = hosts_of(used, &fault.wrong_ranks);
        let names = wrong.join(" and ");
        let is_left = |host: &Host| !wrong.contains(&host.name);
        if !self.hosts.iter().any(is_left) {
            let why = format!("the run does not continue, because no host is left without {names}:\n");
            return Err(failure.under(why));
        }
        self.hosts.retain(is_left);
        let change = match &wrong[..] {
            [host] => format!("its host {host} is left out"),
            _ => format!("the hosts {names} are left out"),
        };
        let fault = Fault { summary: format!("{}; {change}", fault.summary), ..fault.clone() };
        Ok(failure.with_fault(Some(fault)))
    }

    /// Returns the hosts that the run uses only if the others do not suffice: the hosts of slow ranks and, if the run
    /// `grows`, the hosts that it has lost several times.
    fn avoided(&self, grows: bool, now: Duration) -> Vec<&String> {
        let left_out = self.lost.iter().filter(|host| grows && now < host.until).map(|host| &host.name);
        self.slow.iter().chain(left_out).collect()
    }

    /// Returns the hosts onto which a run can grow that uses some: the others that are not avoided.
    pub(super) fn unused(&self, used: &[Host], now: Duration) -> Vec<Host> {
        let avoided = self.avoided(true, now);
        let is_unused = |host: &&Host| !used.contains(host) && !avoided.contains(&&host.name);
        self.hosts.iter().filter(is_unused).cloned().collect()
    }

    /// Sorts hosts that answer, those that the run avoids last. Returns the slots that a run of so many `processes` may
    /// use: the slots of the hosts that it does not avoid if they take all processes, and otherwise the slots of all. So
    /// the run does not grow onto a slow host.
    pub(super) fn sort(&self, hosts: &mut [Host], processes: u32, grows: bool, now: Duration) -> u32 {
        let avoided = self.avoided(grows, now);
        // The sort is stable.
        hosts.sort_by_key(|host| avoided.contains(&&host.name));
        let preferred = slots(hosts.iter().filter(|host| !avoided.contains(&&host.name)));
        if preferred >= processes { preferred } else { slots(hosts.iter()) }
    }

    /// Returns the hosts of slow ranks without which a run of so many `processes` can do: the hosts of `answering` but
    /// these and those that were slow before take all processes. If the slots do not suffice for all ranks, the first
    /// ones are replaced. `used` are the hosts of the processes. Returns `None` if no host can be replaced.
    pub(super) fn replacement(
        &self,
        ranks: &[SlowRank],
        used: &[Host],
        answering: &[Host],
        processes: u32,
    ) -> Option<Replacement> {
        let mut chosen = Replacement::default();
        for rank in ranks {
            let own = hosts_of(used, &rank.ranks);
            let mut hosts = chosen.hosts.clone();
            hosts.extend(own.iter().filter(|host| !chosen.hosts.contains(host)).cloned());
            let is_other = |host: &&Host| !hosts.contains(&host.name) && !self.slow.contains(&host.name);
            if !own.is_empty() && slots(answering.iter().filter(is_other)) >= processes {
                chosen.slow.push(rank.clone());
                chosen.hosts = hosts;
            }
        }
        (!chosen.slow.is_empty()).then_some(chosen)
    }
}

impl Replacement {
    /// Returns the failure after which the run is restarted on other hosts.
    pub(super) fn failure(&self) -> RunError {
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
        RunError::new(ErrorKind::RankFailed, summary).with_fault(Some(fault))
    }
}

/// Returns the processes that hosts take.
pub(super) fn slots<'a>(hosts: impl IntoIterator<Item = &'a Host>) -> u32 {
    hosts.into_iter().fold(0, |slots, host| slots.saturating_add(host.slots))
}

/// Returns the names of the hosts that `is_meant`.
pub(super) fn names_of(hosts: &[Host], is_meant: impl Fn(&Host) -> bool) -> Vec<String> {
    hosts.iter().filter(|host| is_meant(host)).map(|host| host.name.clone()).collect()
}

/// Returns the first hosts that take this many processes together; `None` if all hosts take fewer. An empty
/// list means that the processes run on this machine, which takes any number.
pub(super) fn enough(hosts: &[Host], processes: u32) -> Option<Vec<Host>> {
    let mut left = processes;
    let needed = |host: &&Host| {
        let is_needed = left > 0;
        left = left.saturating_sub(host.slots);
        is_needed
    };
    let chosen = hosts.iter().take_while(needed).cloned().collect();
    (hosts.is_empty() || slots(hosts) >= processes).then_some(chosen)
}

/// Returns the names of the hosts of some ranks, each once. A launcher fills the slots of a host before it
/// starts processes on the next one.
fn hosts_of(hosts: &[Host], ranks: &[u32]) -> Vec<String> {
    let slots = hosts.iter().flat_map(|host| std::iter::repeat_n(&host.name, host.slots as usize));
    let mut names: Vec<String> =
        (0..).zip(slots).filter(|(rank, _)| ranks.contains(rank)).map(|(_, name)| name.clone()).collect();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::Rank;
    use pipewright_schedule::slow_ranks::SpeedChange;

    use super::*;

    /// Returns hosts whose names are letters, with two slots each.
    fn hosts(letters: &str) -> Vec<Host> {
        letters.chars().map(|letter| Host { name: letter.to_string(), slots: 2 }).collect()
    }

    fn names(letters: &str) -> Vec<String> {
        names_of(&hosts(letters), |_| true)
    }

    /// Checks for how many seconds a host is left out after the last of the losses at these seconds.
    fn check_lost(losses: &[u64], expected: u64) {
        let mut table = HostTable::new(hosts("ab"));
        losses.iter().for_each(|&at| table.note_lost(&names("b"), Duration::from_secs(at)));
        let last = losses.last().expect("a loss");
        let is_left_out = |seconds| !table.avoided(true, Duration::from_secs(last + seconds)).is_empty();
        assert!(!is_left_out(expected) && (expected == 0 || is_left_out(expected - 1)), "{losses:?}");
    }

    #[test]
    fn a_host_that_is_lost_again_is_left_out_for_longer() {
        check_lost(&[0], 0);
        check_lost(&[0, 10], 60);
        check_lost(&[0, 10, 100], 120);
        check_lost(&[0, 10, 100, 300], 240);
        check_lost(&(0..40).map(|loss| loss * 60).collect::<Vec<_>>(), 86_400);
        // Losses of an hour ago do not count.
        check_lost(&[0, 3599], 60);
        check_lost(&[0, 3600], 0);
        check_lost(&[0, 10, 10 + 60 + 3600], 0);
    }

    #[test]
    fn losses_are_counted_for_each_host() {
        let mut table = HostTable::new(hosts("ab"));
        for lost in ["ab", "b"] {
            table.note_lost(&names(lost), Duration::ZERO);
        }
        assert_eq!(table.avoided(true, Duration::ZERO), ["b"]);
        assert!(table.avoided(false, Duration::ZERO).is_empty(), "the run does not grow");
        assert_eq!(table.unused(&hosts("a"), Duration::ZERO), []);
        assert_eq!(table.unused(&hosts("b"), Duration::ZERO), hosts("a"));
    }

    #[test]
    fn a_run_does_not_grow_onto_a_slow_host() {
        let mut table = HostTable::new(hosts("abc"));
        table.note_slow(&names("a"));
        let sort = |processes| {
            let mut answering = hosts("abc");
            let slots = table.sort(&mut answering, processes, true, Duration::ZERO);
            assert_eq!(answering, hosts("bca"));
            slots
        };
        assert_eq!([2, 4, 5].map(sort), [4, 4, 6]);
    }

    #[test]
    fn spare_hosts_are_not_used() {
        let all = hosts("abc");
        assert_eq!(
            [2, 3, 6].map(|count| enough(&all, count)),
            ["a", "ab", "abc"].map(|all| Some(hosts(all)))
        );
        assert_eq!(enough(&all, 7), None);
        assert_eq!(enough(&[], 4), Some(Vec::new()));
    }

    fn slow_rank(rank: u32) -> SlowRank {
        let change = SpeedChange { rank: Rank::new(rank), is_slow: true, slowdown: 3.0 };
        SlowRank::after(12, &change, 1)
    }

    /// Checks which hosts are replaced if the `ranks` are slow in a run of three processes on the hosts `a` and `b`.
    fn check_slow(ranks: &[u32], all: &str, slow: &str, expected: &str) {
        let mut table = HostTable::new(hosts(all));
        table.note_slow(&names(slow));
        let ranks: Vec<SlowRank> = ranks.iter().copied().map(slow_rank).collect();
        let replacement = table.replacement(&ranks, &hosts("ab"), table.hosts(), 3);
        assert_eq!(replacement.map(|replacement| replacement.hosts.concat()).unwrap_or_default(), expected);
    }

    #[test]
    fn hosts_are_replaced_if_the_others_take_all_processes() {
        check_slow(&[2], "abcd", "", "b");
        check_slow(&[0], "abcd", "c", "a");
        check_slow(&[0], "abcd", "cd", "");
        check_slow(&[0], "ab", "", "");
        check_slow(&[0], "", "", "");
        check_slow(&[0, 2], "abcd", "", "ab");
        check_slow(&[0, 2], "abc", "", "a");
        check_slow(&[0, 1], "abc", "", "a");
    }

    #[test]
    fn a_replacement_says_which_hosts_are_slow() {
        let summary = |hosts: &str| {
            let failure = Replacement { slow: vec![slow_rank(2)], hosts: names(hosts) }.failure();
            failure.fault().expect("a fault").summary.clone()
        };
        let one = summary("b");
        assert!(one.starts_with("step 12: rank 2 is slow: "), "{one}");
        assert!(one.ends_with("; its host b becomes a spare host"), "{one}");
        let two = summary("ab");
        assert!(two.ends_with("; the hosts a and b become spare hosts"), "{two}");
    }

    /// Checks which hosts are left of `all` if ranks of a run on the hosts `a` and `b` have computed wrong bits, and what
    /// is said about it.
    fn check_wrong(ranks: &[u32], all: &str, left: &str, said: &str) {
        let summary = "step 7: wrong bits".to_owned();
        let wrong_ranks = ranks.to_vec();
        let fault = Fault { step: 7, summary: summary.clone(), wrong_ranks, ..Fault::default() };
        let failure = RunError::new(ErrorKind::RankFailed, summary).with_fault(Some(fault));
        let mut table = HostTable::new(hosts(all));
        let summary = match table.leave_out_wrong(failure, &hosts("ab")) {
            Ok(failure) => failure.fault().expect("a fault").summary.clone(),
            Err(failure) => failure.full_text(),
        };
        assert_eq!((summary.as_str(), table.hosts()), (said, &hosts(left)[..]));
    }

    #[test]
    fn hosts_of_wrong_ranks_are_left_out() {
        check_wrong(&[2], "abc", "ac", "step 7: wrong bits; its host b is left out");
        check_wrong(&[2], "ab", "a", "step 7: wrong bits; its host b is left out");
        check_wrong(&[0, 1], "abc", "bc", "step 7: wrong bits; its host a is left out");
        check_wrong(&[1, 3], "abc", "c", "step 7: wrong bits; the hosts a and b are left out");
        check_wrong(&[], "abc", "abc", "step 7: wrong bits");
        let said = "the run does not continue, because no host is left without a and b:\nstep 7: wrong bits";
        check_wrong(&[0, 2], "ab", "ab", said);
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
}
