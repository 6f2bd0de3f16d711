//! [`Ended`]: how the processes of a run have ended, and whether a restart may follow.

use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use crate::failure::{Exit, Failure};
use crate::fault::Fault;
use crate::launch::attempt::Stop;
use crate::recovery::{Restart, is_full};
use crate::run_folder::newest_checkpoint_bytes;
use crate::run_record::metrics;
use crate::text::quoted;

/// A run whose processes have ended.
pub(super) struct Ended<'a> {
    /// Its folder.
    pub(super) folder: &'a Path,
    /// Whether the folder has this run, and not an earlier one.
    pub(super) has_run: bool,
}

impl Ended<'_> {
    /// Judges the end of the launcher. A failure that is a fault may be followed by a restart.
    /// `late` is the time after which it was ended because its processes had not joined each other.
    pub(super) fn outcome(
        &self,
        status: ExitStatus,
        late: Option<Duration>,
        stop: &Stop,
    ) -> Result<(), Failure> {
        let exit = match status.code() {
            Some(0) => return Ok(()),
            _ if late.is_some() => Exit::RankFailed,
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
        match self.fault(exit, status, late) {
            Some((fault, report)) => Err(Failure::new(exit, report).with_fault(Some(fault))),
            None => Err(Failure::already_reported(exit)),
        }
    }

    /// Returns the fault that ended the processes, and its report; `None` if it is a mistake of the user.
    fn fault(&self, exit: Exit, status: ExitStatus, late: Option<Duration>) -> Option<(Fault, String)> {
        let first = Fault::take(self.folder).map(|(fault, report)| (self.with_space(fault), report));
        first.or_else(|| {
            // A full disk may not even take the first cause.
            let is_disk_full = self.has_run && is_full(self.folder);
            // The launcher may have ended the leader before it had left the fault.
            let second = Fault::take_second(self.folder);
            if second.is_some() && exit == Exit::RankFailed && !is_disk_full {
                return second;
            }
            let cause = match (is_disk_full, late, exit) {
                (true, ..) => "the disk is full".to_owned(),
                (false, Some(waited), _) => {
                    format!("the processes have not joined each other within {} s", waited.as_secs())
                }
                (false, None, Exit::WrongInput) => return None,
                // It is not the same failure as one in the step that the run resumes with.
                (false, None, _) if Restart::is_left(self.folder) => {
                    format!("a process has ended before the run had resumed: {status}")
                }
                (false, None, _) => format!("a process has ended: {status}"),
            };
            let step = self.steps_done() + 1;
            let summary = format!("step {step}: {cause}");
            let space = is_disk_full.then(|| newest_checkpoint_bytes(self.folder).unwrap_or_default());
            let fault =
                Fault { step, rank: None, cause, summary: summary.clone(), space, ..Fault::default() };
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

    /// Returns the last step in the metrics.
    pub(super) fn steps_done(&self) -> u64 {
        let steps = if self.has_run { metrics(self.folder).unwrap_or_default() } else { Vec::new() };
        steps.last().map_or(0, |step| step.step)
    }
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

    use pipewright::failure::{Cause, StepError};
    use pipewright::ids::WorldRank;

    use super::*;

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
        let ended = Ended { folder: folder.path(), has_run: false };
        let failure = ended.outcome(ExitStatus::from_raw(code << 8), None, &Stop::default());
        let failure = failure.expect_err("it has failed");
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
            let ended = Ended { folder: folder.path(), has_run: false };
            let failure = ended.outcome(ExitStatus::from_raw(4 << 8), None, &Stop::default());
            failure.expect_err("it has failed").fault().expect("a fault").clone()
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
        assert_eq!(asked.exit, Exit::Interrupted);
        assert_eq!(asked.full_text(), "stopped by a signal; resume with: pipewright resume out");
        assert_eq!(refused.exit, Exit::RankFailed);
        assert!(refused.full_text().ends_with("resume with: pipewright resume out\nno host"));
    }
}
