//! Takes the hosts of ranks that have computed wrong bits from the hosts of a run.

use crate::failure::Failure;
use crate::launch::hosts::{Host, Places, hosts_of};
use pipewright_run::fault::Fault;

/// Takes the hosts of the ranks that have computed wrong bits from `places`, and adds their names to the
/// failure. `used` are the hosts of the processes. Returns another failure as it is.
///
/// # Errors
/// Returns the failure, after which the run is not restarted, if no host would be left.
pub(super) fn leave_out(failure: Failure, used: &[Host], places: &mut Places) -> Result<Failure, Failure> {
    let Some(fault) = failure.fault().filter(|fault| !fault.wrong_ranks.is_empty()) else {
        return Ok(failure);
    };
    let hosts = hosts_of(used, &fault.wrong_ranks);
    let names = hosts.join(" and ");
    if !places.leave_out(&hosts) {
        let why = format!("the run does not continue, because no host is left without {names}:\n");
        return Err(failure.under(why));
    }
    let change = match &hosts[..] {
        [host] => format!("its host {host} is left out"),
        _ => format!("the hosts {names} are left out"),
    };
    let fault = Fault { summary: format!("{}; {change}", fault.summary), ..fault.clone() };
    Ok(failure.with_fault(Some(fault)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;

    fn hosts(names: &str) -> Vec<Host> {
        names.chars().map(|name| Host { name: name.to_string(), slots: 2 }).collect()
    }

    fn failure(wrong_ranks: &[u32]) -> Failure {
        let fault = Fault {
            step: 7,
            rank: Some(1),
            cause: "wrong bits".to_owned(),
            summary: "step 7: wrong bits".to_owned(),
            wrong_ranks: wrong_ranks.to_vec(),
            ..Fault::default()
        };
        Failure::new(Exit::RankFailed, "step 7: wrong bits").with_fault(Some(fault))
    }

    /// Checks which hosts are left of `all`, whose names are letters, if ranks of a run on the hosts `a` and
    /// `b` have computed wrong bits, and what is said about it.
    fn check(ranks: &[u32], all: &str, left: &str, said: &str) {
        let mut places = Places::Hosts(hosts(all));
        let summary = match leave_out(failure(ranks), &hosts("ab"), &mut places) {
            Ok(failure) => failure.fault().expect("a fault").summary.clone(),
            Err(failure) => failure.full_text(),
        };
        assert_eq!(summary, said);
        assert_eq!(places, Places::Hosts(hosts(left)));
    }

    #[test]
    fn hosts_of_wrong_ranks_are_left_out() {
        check(&[2], "abc", "ac", "step 7: wrong bits; its host b is left out");
        check(&[2], "ab", "a", "step 7: wrong bits; its host b is left out");
        check(&[0, 1], "abc", "bc", "step 7: wrong bits; its host a is left out");
        check(&[1, 3], "abc", "c", "step 7: wrong bits; the hosts a and b are left out");
        check(&[], "abc", "abc", "step 7: wrong bits");
    }

    #[test]
    fn a_run_without_another_host_ends() {
        let said = "the run does not continue, because no host is left without a and b:\nstep 7: wrong bits";
        check(&[0, 2], "ab", "ab", said);
    }
}
