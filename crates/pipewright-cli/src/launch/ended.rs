//! [`Ended`]: how the processes of a run have ended, and whether a restart may follow.

use std::path::Path;

use crate::failure::{Exit, Failure};
use crate::launch::attempt::{AttemptEnd, Stop};
use crate::launch::watch::Early;
use pipewright_run::fault::Fault;
use pipewright_run::recovery::{Restart, is_full};
use pipewright_run::run_folder::newest_checkpoint_bytes;
use pipewright_run::run_record::metrics;
use pipewright_run::text::quoted;

/// A run whose processes have ended.
pub(super) struct Ended<'a> {
    /// Its folder.
    pub(super) folder: &'a Path,
    /// Whether the folder has this run, and not an earlier one.
    pub(super) has_run: bool,
    /// How its launcher has ended.
    pub(super) end: AttemptEnd,
}

impl Ended<'_> {
    /// Judges the end of the launcher. A failure that is a fault may be followed by a restart.
    pub(super) fn outcome(&self, stop: &Stop) -> Result<(), Failure> {
        let exit = match self.end.status.code() {
            Some(0) => return Ok(()),
            _ if self.end.early.is_some() => Exit::RankFailed,
            Some(2) => Exit::WrongInput,
            Some(3) => Exit::CheckFailed,
            Some(5) => Exit::Interrupted,
            Some(70) => Exit::Bug,
            _ => Exit::RankFailed,
        };
        if matches!(exit, Exit::CheckFailed | Exit::Interrupted | Exit::Bug) {
            return Err(Failure::already_reported(exit));
        }
        if stop.is_asked() && exit == Exit::RankFailed {
            // A rank may have failed by itself. Otherwise the signal has ended the launcher.
            let fault = Fault::take(self.folder).or_else(|| Fault::take_second(self.folder));
            return Err(fault.map_or_else(
                || {
                    Failure::new(
                        Exit::Interrupted,
                        "stopped by a signal before the processes had saved a checkpoint",
                    )
                },
                |(_, report)| Failure::new(exit, report),
            ));
        }
        match self.fault(exit) {
            Some((fault, report)) => Err(Failure::new(exit, report).with_fault(Some(fault))),
            None => Err(Failure::already_reported(exit)),
        }
    }

    /// Returns the fault that ended the processes, and its report; `None` if it is a mistake of the user.
    fn fault(&self, exit: Exit) -> Option<(Fault, String)> {
        let first = Fault::take(self.folder).map(|(fault, report)| (self.with_space(fault), report));
        first.or_else(|| {
            // A full disk may not even take the first cause.
            let is_disk_full = self.has_run && is_full(self.folder);
            // The launcher may have ended the leader before it had left the fault.
            let second = Fault::take_second(self.folder);
            if second.is_some() && exit == Exit::RankFailed && !is_disk_full {
                return second;
            }
            let status = self.end.status;
            let cause = match (is_disk_full, self.end.early, exit) {
                (true, ..) => "the disk is full".to_owned(),
                (false, Some(early), _) => cause_of(early),
                (false, None, Exit::WrongInput) => return None,
                // It is not the same failure as one in the step that the run resumes with.
                (false, None, _) if Restart::is_left(self.folder) => {
                    format!("a process has ended before the run had resumed: {status}")
                }
                (false, None, _) => format!("a process has ended: {status}"),
            };
            let is_external = !is_disk_full && is_external(self.end);
            let step = steps_done(self.folder, self.has_run) + 1;
            let summary = format!("step {step}: {cause}");
            let space = is_disk_full.then(|| newest_checkpoint_bytes(self.folder).unwrap_or_default());
            let fault =
                Fault { step, cause, summary: summary.clone(), space, is_external, ..Fault::default() };
            Some((fault, summary))
        })
    }

    /// Returns the fault with the space that the run needs to continue, if the disk is full. The process that
    /// has left the fault may have noticed only that another one, which could not write, had ended.
    fn with_space(&self, fault: Fault) -> Fault {
        if fault.space.is_some() || !self.has_run || !is_full(self.folder) {
            return fault;
        }
        Fault { space: Some(newest_checkpoint_bytes(self.folder).unwrap_or_default()), ..fault }
    }
}

/// Returns the last step in the metrics of a folder that contains the run if `has_run`.
pub(super) fn steps_done(folder: &Path, has_run: bool) -> u64 {
    let steps = if has_run { metrics(folder).unwrap_or_default() } else { Vec::new() };
    steps.last().map_or(0, |step| step.step)
}

/// Returns words about a launcher that was ended although no process had left a fault.
fn cause_of(early: Early) -> String {
    match early {
        Early::Late(waited) => {
            format!("the processes have not joined each other within {} s", waited.as_secs())
        }
        Early::Silent(waited) => format!("the processes have sent no heartbeat for {} s", waited.as_secs()),
        Early::Stopped(waited) => format!("the launcher was stopped for {} s", waited.as_secs()),
    }
}

/// Returns whether the end of a launcher without a record of a fault may come from outside the run, so that the same end
/// in the same step is not a failure that repeats. A launcher that starts no processes says why, and would not start
/// them the next time either.
fn is_external(end: AttemptEnd) -> bool {
    /// A launcher ends with this number plus the number of the signal that has ended a process.
    const ENDED_BY_SIGNAL: i32 = 128;
    let by_signal = end.status.code().is_none_or(|code| code > ENDED_BY_SIGNAL);
    by_signal || end.early.is_some() || end.joined.is_some()
}

/// Returns the end of a run that was stopped, with a checkpoint, for a `reason`, and that does not continue
/// because of `why`, or because a signal has come meanwhile.
pub(super) fn stopped(why: Failure, reason: &str, is_asked: bool, folder: &Path) -> Failure {
    if is_asked {
        return stopped_by_signal(folder);
    }
    let advice = resume_advice(folder);
    why.under(format!("the run has saved a checkpoint and stopped, because {reason}; {advice}\n"))
}

/// Returns the end of a run that a signal has stopped, with a checkpoint.
pub(super) fn stopped_by_signal(folder: &Path) -> Failure {
    Failure::new(Exit::Interrupted, format!("stopped by a signal; {}", resume_advice(folder)))
}

fn resume_advice(folder: &Path) -> String {
    format!("resume with: pipewright resume {}", quoted(&folder.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;
    use std::time::Duration;

    use pipewright::failure::{Cause, StepError};
    use pipewright::ids::WorldRank;

    use super::*;

    /// Returns the end of a launcher with this status of the system, before its processes had joined each other.
    fn end(status: i32) -> AttemptEnd {
        AttemptEnd { status: ExitStatus::from_raw(status), early: None, joined: None }
    }

    #[test]
    fn an_end_that_may_come_from_outside_does_not_repeat() {
        let waited = Duration::from_secs(3);
        let joined = |end| AttemptEnd { joined: Some(waited), ..end };
        for (end, expected) in [
            (end(9), true),
            (end(137 << 8), true),
            (joined(end(1 << 8)), true),
            (AttemptEnd { early: Some(Early::Late(waited)), ..end(1 << 8) }, true),
            // The launcher, or a process before it had joined the others, reports a reason of its own.
            (end(1 << 8), false),
            (end(127 << 8), false),
        ] {
            assert_eq!(is_external(end), expected, "{end:?}");
        }
    }

    /// Checks the cause of the end of processes with an exit code, after the leader or another process has
    /// left the fault.
    fn check_cause(code: i32, has_first: bool, has_second: bool, expected: Option<&str>) {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let fault = |peer: u32| {
            let [rank, peer] = [0, peer].map(WorldRank::new);
            Fault::of_step(&StepError { rank, step: 7.into(), action: None, cause: Cause::LostPeer { peer } })
        };
        if has_first {
            assert!(fault(1).leave(folder.path(), "a report"));
        }
        if has_second {
            fault(2).leave_second(folder.path(), "a report", WorldRank::new(3));
        }
        let ended = Ended { folder: folder.path(), has_run: false, end: end(code << 8) };
        let failure = ended.outcome(&Stop::default()).expect_err("it has failed");
        assert_eq!(failure.fault().map(|fault| fault.cause.as_str()), expected);
    }

    #[test]
    fn the_fault_that_another_process_has_seen_counts_if_the_leader_has_left_none() {
        let [first, second] = [1, 2].map(|peer| Cause::LostPeer { peer: WorldRank::new(peer) }.to_string());
        check_cause(4, true, true, Some(&first));
        check_cause(4, false, true, Some(&second));
        check_cause(4, false, false, Some("a process has ended: exit status: 4"));
        // The leader has reported a mistake of the user.
        check_cause(2, false, true, None);
    }

    #[test]
    fn an_end_before_the_run_has_resumed_is_another_failure() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let fault = || {
            let ended = Ended { folder: folder.path(), has_run: false, end: end(4 << 8) };
            let failure = ended.outcome(&Stop::default()).expect_err("it has failed");
            failure.fault().expect("a fault").clone()
        };
        let in_a_step = fault();
        Restart::after(&in_a_step, 1, 3).leave(folder.path()).expect("the folder takes files");
        let before = fault();
        assert_eq!(before.cause, "a process has ended before the run had resumed: exit status: 4");
        assert!(!before.repeats(&in_a_step) && before.repeats(&fault()));
    }

    #[test]
    fn a_signal_while_a_slow_host_is_replaced_interrupts_the_run() {
        let no_host = || Failure::new(Exit::RankFailed, "no host");
        let end = |is_asked| stopped(no_host(), "a host is slow", is_asked, Path::new("out"));
        let (asked, refused) = (end(true), end(false));
        assert_eq!(asked.kind, Exit::Interrupted);
        assert_eq!(asked.full_text(), "stopped by a signal; resume with: pipewright resume out");
        assert_eq!(refused.kind, Exit::RankFailed);
        assert!(refused.full_text().ends_with("resume with: pipewright resume out\nno host"));
    }
}
