//! [`Restarts`]: decides whether a run continues after a failure, whether its ranks are threads or processes.

use std::time::Duration;

use pipewright_schedule::bytes::bytes_text as human_bytes;
use pipewright_schedule::words::counted;

use crate::error::{FailedRun, RunError};
use crate::fault::Fault;
use crate::recovery::restart::Restart;

/// The restarts of a run so far.
#[derive(Debug, Default)]
pub struct Restarts {
    /// The most restarts.
    limit: u64,
    done: u64,
    /// How often the run has continued on more processes, which is not counted as a restart.
    growths: u64,
    /// The last fault, and its report.
    last: Option<(Fault, String)>,
}

/// The decision to restart a run.
#[derive(Debug)]
pub struct NextRestart {
    /// The record of the restart.
    pub record: Restart,
    /// The failure that the restart follows, which the run ends with if it cannot be restarted.
    pub failure: RunError,
    /// The bytes that the disk must have before the run continues, if the failure is a full disk.
    space: Option<u64>,
}

impl NextRestart {
    /// Returns the failure of a run that cannot be restarted because of `why`, which has the earlier report
    /// above it.
    pub fn refused(&self, why: RunError) -> RunError {
        below(&self.failure.full_text(), why)
    }

    /// Returns the bytes that the disk must have before the run continues, with a sentence about the wait; `None` if the
    /// failure is not a full disk.
    pub fn space(&self) -> Option<(u64, String)> {
        Some((self.space?, format!("{}; the run waits for space on the disk", self.record.cause)))
    }

    /// Returns this decision after the wait for space, which has taken at most `patience`.
    ///
    /// # Errors
    /// Returns the failure if a signal `is_asked` for the end, or if the disk does not have the space.
    pub fn after_wait(self, has_space: bool, is_asked: bool, patience: Duration) -> Result<Self, RunError> {
        if is_asked {
            Err(self.failure)
        } else if has_space {
            Ok(self)
        } else {
            Err(self.without_space(patience))
        }
    }

    /// Returns the failure of a run that has waited in vain for space on the disk.
    fn without_space(self, waited: Duration) -> RunError {
        let (space, waited) = (human_bytes(self.space.unwrap_or_default()), waited.as_secs());
        self.failure.under(format!(
            "the disk did not have the {space} of a checkpoint for {waited} s (`run.deadline_seconds`), so the run ends:\n"
        ))
    }
}

impl Restarts {
    /// Returns the restarts of a run that may have so many.
    pub fn new(limit: u64) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Returns whether a restart is left.
    pub fn has_left(&self) -> bool {
        self.done < self.limit
    }

    /// Decides whether the run is restarted. `has_resumed` says whether the attempt that has failed had begun or resumed the
    /// run.
    ///
    /// # Errors
    /// Returns the failure if the run ends with it: it is not a fault or a final one, it repeats the last
    /// fault, or all restarts are done. A failure that repeats, or that comes before the run has resumed, has the earlier
    /// report above its own.
    pub fn next(&mut self, failure: RunError, has_resumed: bool) -> Result<NextRestart, RunError> {
        let Some(fault) = failure.fault().cloned() else {
            return Err(match &self.last {
                Some((_, report)) if !has_resumed => below(report, failure),
                _ => failure,
            });
        };
        if self.limit == 0 || fault.is_final {
            return Err(failure);
        }
        let report = failure.full_text();
        match self.last.replace((fault.clone(), report)) {
            Some((earlier, report)) if fault.repeats(&earlier) => {
                let why =
                    "the failure repeats at the same step with the same cause, so the run does not continue";
                return Err(failure.under(format!("the first failure:\n{report}\n{why}:\n")));
            }
            _ if self.done == self.limit => {
                let used = format!("the run has used its {}, so it ends:\n", counted(self.limit, "restart"));
                return Err(failure.under(used));
            }
            _ => {}
        }
        self.done += 1;
        let record = Restart { growths: self.growths, ..Restart::after(&fault, self.done, self.limit) };
        Ok(NextRestart { record, space: fault.space, failure })
    }

    /// Returns the record of a run that continues on more processes because of `cause`.
    pub fn grow(&mut self, cause: String) -> Restart {
        self.growths += 1;
        Restart::growth(cause, self.done, self.growths)
    }
}

/// Returns a failure to restart a run, with the report of the fault above it.
fn below(report: &str, failure: RunError) -> RunError {
    failure.under(format!("the run failed:\n{report}\nand it cannot be resumed:\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn failure(step: u64, cause: &str) -> RunError {
        let fault = Fault {
            step,
            rank: Some(1),
            cause: cause.to_owned(),
            summary: format!("step {step}: rank 1: {cause}"),
            ..Fault::default()
        };
        RunError::new(ErrorKind::RankFailed, fault.summary.clone()).with_fault(Some(fault))
    }

    #[test]
    fn a_run_continues_until_its_restarts_are_used() {
        let mut restarts = Restarts::new(2);
        let numbers = [1, 2]
            .map(|step| restarts.next(failure(step, "lost"), true).expect("it continues").record.restart);
        assert_eq!(numbers, [1, 2]);
        let end = restarts.next(failure(3, "lost"), true).expect_err("two restarts");
        assert!(end.full_text().starts_with("the run has used its 2 restarts"), "{}", end.full_text());
    }

    #[test]
    fn growth_is_not_counted_as_a_restart() {
        let mut restarts = Restarts::new(2);
        let first = restarts.next(failure(1, "lost"), true).expect("it continues").record;
        let growths = [(); 2].map(|()| restarts.grow("b answers".to_owned()));
        let second = restarts.next(failure(2, "lost"), true).expect("one restart is left").record;
        assert_eq!([first.number(), growths[0].number(), growths[1].number(), second.number()], [1, 2, 3, 4]);
        assert_eq!((second.restart, second.of), (2, 2));
        assert!(!restarts.has_left());
    }

    #[test]
    fn a_fault_that_repeats_ends_the_run_with_both_reports() {
        let mut restarts = Restarts::new(9);
        for cause in ["lost", "panic", "lost"] {
            assert!(restarts.next(failure(3, cause), true).is_ok(), "another cause than the last one");
        }
        let end = restarts.next(failure(3, "lost"), true).expect_err("the same fault again").full_text();
        assert_eq!(end.matches("step 3: rank 1: lost").count(), 2, "{end}");
        assert!(end.contains("repeats at the same step with the same cause"), "{end}");
    }

    #[test]
    fn a_run_that_does_not_resume_reports_both_failures() {
        let mut restarts = Restarts::new(9);
        let next = restarts.next(failure(3, "lost"), true).expect("it continues");
        let refused = next.refused(RunError::input("no hosts")).full_text();
        assert_eq!(refused, "the run failed:\nstep 3: rank 1: lost\nand it cannot be resumed:\nno hosts");
        assert_eq!(
            restarts.next(RunError::input("no hosts"), false).expect_err("no fault").full_text(),
            refused
        );
    }

    #[test]
    fn other_failures_and_runs_without_restarts_end() {
        let mut restarts = Restarts::new(9);
        assert!(restarts.next(RunError::input("a mistake"), true).is_err());
        assert!(Restarts::new(0).next(failure(3, "lost"), true).is_err());
        let wrong_bits = failure(3, "rank 1 has computed wrong bits");
        let fault = Fault { is_final: true, ..wrong_bits.fault().expect("a fault").clone() };
        assert!(
            restarts.next(wrong_bits.with_fault(Some(fault)), true).is_err(),
            "a restart would accept wrong bits"
        );
    }
}
