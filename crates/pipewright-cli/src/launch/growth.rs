//! [`Growth`]: looks for hosts on which a run can continue with more processes, while it runs on fewer than
//! it is configured for.

use std::path::Path;

use crate::display::say;
use crate::launch::hosts::Host;
use crate::launch::layout::Layout;
use crate::launch::returning_hosts::{Answering, Question, ReturningHosts};
use crate::launch::whole_run::WholeRun;
use pipewright_run::recovery::request_growth;

/// The search during one attempt.
pub(super) struct Growth {
    returning: ReturningHosts,
    /// The hosts that have answered although the run cannot grow onto them.
    useless: Vec<String>,
    /// The last words about hosts that cannot take part again, which were printed.
    refusal: Option<String>,
    /// The hosts for which the processes are asked to end after their next checkpoint.
    asked: Vec<String>,
}

/// The run that may grow.
pub(super) struct Growing<'a> {
    pub(super) whole: &'a WholeRun,
    /// The layout of the processes.
    pub(super) layout: Layout,
    /// The hosts of the processes.
    pub(super) used: &'a [Host],
    /// The folder of the run.
    pub(super) folder: &'a Path,
}

impl Growth {
    /// Returns a search that asks with `returning`.
    pub(super) fn new(returning: ReturningHosts) -> Self {
        Self { returning, useless: Vec::new(), refusal: None, asked: Vec::new() }
    }

    /// Continues the search. If hosts have answered onto which the run can grow, asks the processes to end
    /// after their next checkpoint.
    pub(super) fn poll(&mut self, run: &Growing<'_>, question: impl FnOnce() -> Question) {
        if !self.asked.is_empty() {
            return;
        }
        let Some(Answering { hosts: answering, refusal }) = self.returning.poll(question) else { return };
        if refusal != self.refusal {
            refusal.iter().for_each(|refusal| say(refusal));
            self.refusal = refusal;
        }
        let names: Vec<String> = answering.iter().map(|host| host.name.clone()).collect();
        if names.is_empty() || names == self.useless {
            return;
        }
        let slots = run.used.iter().chain(&answering).map(|host| host.slots).fold(0, u32::saturating_add);
        let (whole, before) = (run.whole, run.whole.processes(run.layout));
        let is_larger = whole.for_slots(slots).is_ok_and(|next| whole.processes(next.layout) > before);
        // If the file cannot be written, the run stays as it is until other hosts answer.
        if is_larger && request_growth(run.folder, &names).is_ok() {
            self.asked = names;
        } else {
            self.useless = names;
        }
    }

    /// Returns the hosts for which the processes were asked to end; `None` if they were not.
    pub(super) fn into_asked(self) -> Option<Vec<String>> {
        Some(self.asked).filter(|hosts| !hosts.is_empty())
    }
}

/// Returns words about hosts that answer again.
pub(super) fn cause_of(hosts: &[String]) -> String {
    match hosts {
        [host] => format!("the host {host} answers"),
        hosts => format!("the hosts {} answer", hosts.join(" and ")),
    }
}
