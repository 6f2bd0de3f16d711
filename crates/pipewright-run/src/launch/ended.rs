//! [`Ended`]: how the processes of an attempt have ended, and the failure that this is.

use std::path::Path;

use pipewright_document::text::quoted;

use crate::error::{ErrorKind, FailedRun, RunError};
use crate::fault::Fault;
use crate::launch::watch::{Early, Watch};

/// What is known when a launcher has ended.
#[derive(Clone, Debug, Default)]
pub(super) struct Ended {
    /// Its exit code; `None` if a signal has ended it.
    pub(super) code: Option<i32>,
    /// Its status in words.
    pub(super) status: String,
    /// The fault that a process has left, and its report.
    pub(super) fault: Option<(Fault, String)>,
    /// Whether the leader has left none, so that the fault is as another process has seen it.
    pub(super) is_second: bool,
    /// If the disk of the run is full: the bytes that the run needs to continue.
    pub(super) space: Option<u64>,
    /// The last step in the metrics of the run.
    pub(super) done: u64,
    /// Whether the processes have begun or resumed the run.
    pub(super) has_resumed: bool,
    /// Whether the processes have asked for the replacement of a slow host.
    pub(super) is_slow: bool,
}

impl Ended {
    /// Judges the end. A failure that is a fault may be followed by a restart. `is_asked` says whether a signal has asked
    /// for the end of the run.
    pub(super) fn outcome(&self, watch: &Watch, is_asked: bool) -> Result<(), RunError> {
        let exit = match self.code {
            Some(0) => return Ok(()),
            _ if watch.early().is_some() => ErrorKind::RankFailed,
            code => code.and_then(ErrorKind::of_exit_code).unwrap_or(ErrorKind::RankFailed),
        };
        if matches!(exit, ErrorKind::CheckFailed | ErrorKind::Interrupted | ErrorKind::Bug) {
            return Err(RunError::already_reported(exit));
        }
        if is_asked && exit == ErrorKind::RankFailed {
            // A rank may have failed by itself. Otherwise the signal has ended the launcher.
            let stopped = "stopped by a signal before the processes had saved a checkpoint";
            return Err(match &self.fault {
                Some((_, report)) => RunError::new(exit, report.clone()),
                None => RunError::new(ErrorKind::Interrupted, stopped),
            });
        }
        match self.fault(watch, exit) {
            Some((fault, report)) => Err(RunError::new(exit, report).with_fault(Some(fault))),
            None => Err(RunError::already_reported(exit)),
        }
    }

    /// Returns whether the processes have saved a checkpoint and ended, as they were asked to.
    pub(super) fn has_saved(&self) -> bool {
        self.code.and_then(ErrorKind::of_exit_code) == Some(ErrorKind::Interrupted)
    }

    /// Returns the fault that ended the processes, and its report; `None` if it is a mistake of the user.
    fn fault(&self, watch: &Watch, exit: ErrorKind) -> Option<(Fault, String)> {
        match &self.fault {
            // The process that has left the fault may have noticed only that another one, which could not write, had
            // ended.
            Some((fault, report)) if !self.is_second => {
                let space = fault.space.or(self.space);
                return Some((Fault { space, ..fault.clone() }, report.clone()));
            }
            // The launcher may have ended the leader before it had left the fault. A full disk may not even take it.
            Some(second) if exit == ErrorKind::RankFailed && self.space.is_none() => {
                return Some(second.clone());
            }
            _ => {}
        }
        let cause = match (self.space, watch.early()) {
            (Some(_), _) => "the disk is full".to_owned(),
            (None, Some(early)) => early.cause(),
            (None, None) if exit == ErrorKind::WrongInput => return None,
            // It is not the same failure as one in the step that the run resumes with.
            (None, None) if !self.has_resumed => {
                format!("a process has ended before the run had resumed: {}", self.status)
            }
            (None, None) => format!("a process has ended: {}", self.status),
        };
        let is_external = self.space.is_none() && self.is_external(watch);
        let fault = Fault { space: self.space, is_external, ..self.fault_of(cause) };
        let report = fault.summary.clone();
        Some((fault, report))
    }

    /// Returns whether the end without a record of a fault may come from outside the run, so that the same end in the same
    /// step is not a failure that repeats. A launcher that starts no processes says why, and would not start them the next
    /// time either.
    fn is_external(&self, watch: &Watch) -> bool {
        /// A launcher ends with this number plus the number of the signal that has ended a process.
        const ENDED_BY_SIGNAL: i32 = 128;
        let by_signal = self.code.is_none_or(|code| code > ENDED_BY_SIGNAL);
        by_signal || watch.early().is_some() || watch.joined().is_some()
    }

    /// Returns the fault of processes that have not resumed the run on these further hosts.
    pub(super) fn failed_growth(&self, hosts: &[String]) -> Fault {
        self.fault_of(format!("the run could not resume with the processes on {}", hosts.join(" and ")))
    }

    /// Returns a fault of the step after the last one.
    fn fault_of(&self, cause: String) -> Fault {
        let step = self.done + 1;
        Fault { step, summary: format!("step {step}: {cause}"), cause, ..Fault::default() }
    }
}

impl Early {
    /// Returns words about a launcher that was ended although no process had left a fault.
    fn cause(self) -> String {
        match self {
            Self::Late(waited) => {
                format!("the processes have not joined each other within {} s", waited.as_secs())
            }
            Self::Silent(waited) => {
                format!("the processes have sent no heartbeat for {} s", waited.as_secs())
            }
            Self::Stopped(waited) => format!("the launcher was stopped for {} s", waited.as_secs()),
        }
    }
}

/// Returns the end of a run that was stopped, with a checkpoint, for a `reason`, and that does not continue
/// because of `why`, or because a signal has come meanwhile.
pub(super) fn stopped(why: RunError, reason: &str, is_asked: bool, folder: &Path) -> RunError {
    if is_asked {
        return stopped_by_signal(folder);
    }
    let advice = resume_advice(folder);
    why.under(format!("the run has saved a checkpoint and stopped, because {reason}; {advice}\n"))
}

/// Returns the end of a run that a signal has stopped, with a checkpoint.
pub(super) fn stopped_by_signal(folder: &Path) -> RunError {
    RunError::new(ErrorKind::Interrupted, format!("stopped by a signal; {}", resume_advice(folder)))
}

fn resume_advice(folder: &Path) -> String {
    format!("resume with: pipewright resume {}", quoted(&folder.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::launch::watch::{Limits, Seen};

    /// Returns a watch of processes that have joined each other, or that were ended because they had not.
    fn watch(has_joined: bool, is_late: bool) -> Watch {
        let limit = if is_late { Duration::ZERO } else { Duration::from_secs(9) };
        let mut watch = Watch::new(Limits { joining: limit, silence: limit, stopped: limit });
        watch.look(Duration::from_secs(1), Seen { has_joined, ..Seen::default() });
        watch
    }

    fn ended(code: Option<i32>) -> Ended {
        let status = format!("exit status: {}", code.unwrap_or_default());
        Ended { code, status, is_second: true, has_resumed: true, ..Ended::default() }
    }

    #[test]
    fn an_end_that_may_come_from_outside_does_not_repeat() {
        for (code, watch, expected) in [
            (None, watch(false, false), true),
            (Some(137), watch(false, false), true),
            (Some(1), watch(true, false), true),
            (Some(1), watch(false, true), true),
            // The launcher, or a process before it had joined the others, reports a reason of its own.
            (Some(1), watch(false, false), false),
            (Some(127), watch(false, false), false),
        ] {
            assert_eq!(ended(code).is_external(&watch), expected, "{code:?} {watch:?}");
        }
    }

    /// Returns the fault of an end, if it is one.
    fn fault(ended: &Ended) -> Option<Fault> {
        let failure = ended.outcome(&watch(false, false), false).expect_err("it has failed");
        failure.fault().cloned()
    }

    #[test]
    fn the_fault_that_another_process_has_seen_counts_if_the_leader_has_left_none() {
        let left = Some((Fault { cause: "left".to_owned(), ..Fault::default() }, "a report".to_owned()));
        let rows = [
            (Ended { fault: left.clone(), is_second: false, ..ended(Some(4)) }, Some("left")),
            (Ended { fault: left.clone(), ..ended(Some(4)) }, Some("left")),
            (Ended { fault: left.clone(), space: Some(9), ..ended(Some(4)) }, Some("the disk is full")),
            (ended(Some(4)), Some("a process has ended: exit status: 4")),
            // The leader has reported a mistake of the user.
            (Ended { fault: left, ..ended(Some(2)) }, None),
        ];
        for (ended, expected) in rows {
            assert_eq!(fault(&ended).map(|fault| fault.cause).as_deref(), expected, "{ended:?}");
        }
    }

    #[test]
    fn an_end_before_the_run_has_resumed_is_another_failure() {
        let in_a_step = fault(&ended(Some(4))).expect("a fault");
        let before = fault(&Ended { has_resumed: false, ..ended(Some(4)) }).expect("a fault");
        assert_eq!(before.cause, "a process has ended before the run had resumed: exit status: 4");
        assert!(!before.repeats(&in_a_step) && before.repeats(&before));
    }

    #[test]
    fn a_signal_while_a_slow_host_is_replaced_interrupts_the_run() {
        let no_host = || RunError::new(ErrorKind::RankFailed, "no host");
        let end = |is_asked| stopped(no_host(), "a host is slow", is_asked, Path::new("out"));
        let (asked, refused) = (end(true), end(false));
        assert_eq!(asked.kind, ErrorKind::Interrupted);
        assert_eq!(asked.full_text(), "stopped by a signal; resume with: pipewright resume out");
        assert_eq!(refused.kind, ErrorKind::RankFailed);
        assert!(refused.full_text().ends_with("resume with: pipewright resume out\nno host"));
    }
}
