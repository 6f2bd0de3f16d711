//! [`Ended`]: how the processes of a run have ended, and whether a restart may follow.

use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use crate::failure::{Exit, Failure};
use crate::fault::Fault;
use crate::launch::attempt::Stop;
use crate::recovery::is_full;
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
            return Err(Fault::take(self.folder).map_or_else(
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
        Fault::take(self.folder).or_else(|| {
            // A full disk may not even take the first cause.
            let is_disk_full = self.has_run && is_full(self.folder);
            let cause = match (is_disk_full, late, exit) {
                (true, ..) => "the disk is full".to_owned(),
                (false, Some(waited), _) => {
                    format!("the processes have not joined each other within {} s", waited.as_secs())
                }
                (false, None, Exit::WrongInput) => return None,
                (false, None, _) => format!("a process has ended: {status}"),
            };
            let step = self.steps_done() + 1;
            let summary = format!("step {step}: {cause}");
            let space = is_disk_full.then(|| newest_checkpoint_bytes(self.folder).unwrap_or_default());
            let fault = Fault {
                step,
                rank: None,
                cause,
                summary: summary.clone(),
                space,
                is_final: false,
                wrong_ranks: Vec::new(),
            };
            Some((fault, summary))
        })
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
    use super::*;

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
