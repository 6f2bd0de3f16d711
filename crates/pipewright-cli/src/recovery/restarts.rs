//! [`Restarts`]: decides whether a run continues after a failure.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use pipewright::bounded_file::write_regular;
use pipewright_schedule::words::counted;

use crate::failure::Failure;
use crate::fault::Fault;
use crate::recovery::restart::Restart;

/// The time between two looks at a full disk.
const PAUSE: Duration = Duration::from_millis(250);

/// The bytes that a disk must take before a run continues on it.
const TRIAL_BYTES: usize = 1 << 20;

/// The restarts of a run so far.
#[derive(Debug, Default)]
pub(crate) struct Restarts {
    done: u64,
    /// The last fault, and its report.
    last: Option<(Fault, String)>,
}

impl Restarts {
    /// Returns the record of the next restart.
    ///
    /// # Errors
    /// Returns the failure if the run ends with it: it is not a fault, it repeats the last fault, or `limit` restarts
    /// are done. A failure that repeats has the earlier report above its own.
    pub(crate) fn next(&mut self, failure: Failure, limit: u64) -> Result<Restart, Failure> {
        let Some(fault) = failure.fault().cloned().filter(|_| limit > 0) else { return Err(failure) };
        let report = failure.full_text();
        match self.last.replace((fault.clone(), report)) {
            Some((earlier, report)) if fault.repeats(&earlier) => {
                let why =
                    "the failure repeats at the same step with the same cause, so the run does not continue";
                return Err(failure.under(format!("the first failure:\n{report}\n{why}:\n")));
            }
            _ if self.done == limit => {
                let used = format!("the run has used its {}, so it ends:\n", counted(limit, "restart"));
                return Err(failure.under(used));
            }
            _ => {}
        }
        self.done += 1;
        Ok(Restart::after(&fault, self.done, limit))
    }

    /// Returns whether the last fault was a full disk.
    pub(crate) fn is_disk_full(&self) -> bool {
        self.last.as_ref().is_some_and(|(fault, _)| fault.is_disk_full)
    }
}

/// Waits until a file can be written into a folder, at most for `patience`. Returns whether it can.
pub(crate) fn wait_for_space(folder: &Path, patience: Duration) -> bool {
    let (since, trial) = (Instant::now(), folder.join(".pipewright-space"));
    loop {
        let written = write_regular(&trial, &vec![0; TRIAL_BYTES]);
        // Best effort: the file may not exist.
        let _ = fs::remove_file(&trial);
        if written.is_ok() || since.elapsed() >= patience {
            return written.is_ok();
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;

    fn failure(step: u64, cause: &str) -> Failure {
        let fault = Fault {
            step,
            rank: Some(1),
            cause: cause.to_owned(),
            summary: format!("step {step}: rank 1: {cause}"),
            is_disk_full: false,
        };
        Failure::new(Exit::RankFailed, fault.summary.clone()).with_fault(Some(fault))
    }

    #[test]
    fn a_run_continues_until_its_restarts_are_used() {
        let mut restarts = Restarts::default();
        let numbers =
            [1, 2].map(|step| restarts.next(failure(step, "lost"), 2).expect("it continues").restart);
        assert_eq!(numbers, [1, 2]);
        let end = restarts.next(failure(3, "lost"), 2).expect_err("two restarts");
        assert!(end.full_text().starts_with("the run has used its 2 restarts"), "{}", end.full_text());
    }

    #[test]
    fn a_fault_that_repeats_ends_the_run_with_both_reports() {
        let mut restarts = Restarts::default();
        for cause in ["lost", "panic", "lost"] {
            assert!(restarts.next(failure(3, cause), 9).is_ok(), "another cause than the last one");
        }
        let end = restarts.next(failure(3, "lost"), 9).expect_err("the same fault again").full_text();
        assert_eq!(end.matches("step 3: rank 1: lost").count(), 2, "{end}");
        assert!(end.contains("repeats at the same step with the same cause"), "{end}");
    }

    #[test]
    fn other_failures_and_runs_without_restarts_end() {
        let mut restarts = Restarts::default();
        assert!(restarts.next(Failure::input("a mistake"), 9).is_err());
        assert!(restarts.next(failure(3, "lost"), 0).is_err());
    }

    #[test]
    fn space_is_awaited_only_as_long_as_the_patience() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        assert!(wait_for_space(folder.path(), Duration::ZERO));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
        assert!(!wait_for_space(&folder.path().join("missing"), Duration::ZERO));
    }
}
