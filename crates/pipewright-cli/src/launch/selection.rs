//! [`Selection`]: the hosts on which a run continues, a part of the hosts that answer.

use crate::launch::answer::Refusal;
use crate::launch::hosts::Host;
use crate::launch::layout::Layout;
use crate::launch::whole_run::Distribution;

/// The hosts on which a run continues, and its layout there.
pub(super) struct Selection {
    pub(super) hosts: Vec<Host>,
    /// The processes that the hosts take.
    pub(super) slots: u32,
    pub(super) layout: Layout,
    /// The configuration of the layout, if the run has begun.
    pub(super) distribution: Option<Distribution>,
}

impl Selection {
    /// Returns words about the change from another layout; `None` if they are equal.
    pub(super) fn change_from(&self, before: Layout) -> Option<String> {
        match &self.distribution {
            Some(distribution) => distribution.change_from(before, self.slots),
            None => self.layout.change_from(before),
        }
    }
}

/// Returns the names of the hosts that `is_meant`.
pub(super) fn names_of(hosts: &[Host], is_meant: impl Fn(&Host) -> bool) -> Vec<String> {
    hosts.iter().filter(|host| is_meant(host)).map(|host| host.name.clone()).collect()
}

/// Returns the hosts that have answered.
pub(super) fn answering(hosts: &[Host], answers: &[Result<(), Refusal>]) -> Vec<Host> {
    hosts.iter().zip(answers).filter(|(_, answer)| answer.is_ok()).map(|(host, _)| host.clone()).collect()
}

/// Returns the slots that a run of so many `processes` may use: the slots of the hosts that are not `slow` if
/// they take all processes, and otherwise the slots of all hosts. So the run does not grow onto a slow host.
pub(super) fn usable_slots(hosts: &[Host], slow: &[String], processes: u32) -> u32 {
    let sum = |slots: u32, host: &Host| slots.saturating_add(host.slots);
    let fast = hosts.iter().filter(|host| !slow.contains(&host.name)).fold(0, sum);
    if fast >= processes { fast } else { hosts.iter().fold(0, sum) }
}

/// Returns the first hosts that take this many processes together; `None` if all hosts take fewer. An empty
/// list means that the processes run on this machine, which takes any number.
pub(super) fn enough(hosts: &[Host], processes: u32) -> Option<Vec<Host>> {
    let mut left = processes;
    let mut chosen = Vec::new();
    for host in hosts {
        if left == 0 {
            break;
        }
        left = left.saturating_sub(host.slots);
        chosen.push(host.clone());
    }
    (left == 0 || hosts.is_empty()).then_some(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts() -> [Host; 3] {
        [("a", 2), ("b", 2), ("c", 2)].map(|(name, slots)| Host { name: name.to_owned(), slots })
    }

    #[test]
    fn a_run_does_not_grow_onto_a_slow_host() {
        let slots = |processes| usable_slots(&hosts(), &["b".to_owned()], processes);
        assert_eq!([2, 4, 5].map(slots), [4, 4, 6]);
    }

    #[test]
    fn spare_hosts_are_not_used() {
        let hosts = hosts();
        let names = |processes| {
            enough(&hosts, processes)
                .map(|hosts| hosts.iter().map(|host| host.name.clone()).collect::<String>())
        };
        assert_eq!([2, 3, 6].map(names), ["a", "ab", "abc"].map(|names| Some(names.to_owned())));
        assert_eq!(names(7), None);
        assert_eq!(enough(&[], 4), Some(Vec::new()));
    }
}
