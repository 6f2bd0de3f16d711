//! The flag that stops all ranks of a process, with the first cause, and the notices for other processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::cause::{Cause, StepError};
use crate::ids::{Attempt, StepNumber};

/// The flag that stops every rank, with the first cause.
#[derive(Clone, Debug, Default)]
pub struct Abort {
    state: Arc<AbortState>,
}

#[derive(Default)]
struct AbortState {
    raised: AtomicBool,
    reasons: Mutex<Reasons>,
    /// Sends notices to the other processes.
    notify: OnceLock<Notify>,
}

type Notify = Box<dyn Fn(FailureNotice) + Send + Sync>;

/// A failure as one process reports it to another.
#[derive(Clone, Debug)]
#[cfg_attr(not(any(feature = "mpi", test)), expect(dead_code, reason = "only MPI reads notices"))]
pub(crate) struct FailureNotice {
    pub(crate) error: StepError,
    /// The attempt that failed.
    pub(crate) attempt: Attempt,
    /// The step since which the ranks' parameters have diverged; `None` if no rank had begun to update.
    pub(crate) diverged: Option<StepNumber>,
}

/// The reasons for the flag. Processes end a failed step at different times, so a failure that another
/// process reports may belong to an attempt that has ended in this process, or to one that has not begun.
#[derive(Debug, Default)]
struct Reasons {
    first: Option<StepError>,
    /// The current attempt at a step. Attempts never decrease, unlike step numbers, which a restore may
    /// reset.
    attempt: Attempt,
    /// The last attempt whose failure was handled.
    over: Option<Attempt>,
    /// A failure of a later attempt.
    early: Option<(StepError, Attempt)>,
    /// A step that failed after some rank had begun to update, in this or another process.
    diverged: Option<StepNumber>,
    /// The failure that another process reported with it.
    diverged_by: Option<StepError>,
}

impl std::fmt::Debug for AbortState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AbortState").field("reasons", &self.reasons).finish_non_exhaustive()
    }
}

impl Abort {
    /// Raises the flag; the first error raised is kept, later ones are dropped.
    pub fn raise(&self, error: StepError) {
        self.raise_first(&mut self.lock(), error);
    }

    /// Like [`Abort::raise`], but only if `attempt` is not over. Work that a failed step has left behind may
    /// fail later, which does not concern the next one.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn raise_in(&self, attempt: Attempt, error: StepError) {
        let mut reasons = self.lock();
        if attempt >= reasons.attempt && reasons.over.is_none_or(|over| attempt > over) {
            self.raise_first(&mut reasons, error);
        }
    }

    fn raise_first(&self, reasons: &mut Reasons, error: StepError) {
        if reasons.first.is_none() {
            // Such a step is usually computed again. If it is not, the pipeline returns the error.
            if matches!(error.cause, Cause::Suspicious { .. } | Cause::Unconfirmed { .. }) {
                tracing::warn!(%error, "a step is suspicious");
            } else {
                tracing::error!(%error, "a step failed");
            }
            self.notify(&error, reasons);
            reasons.first = Some(error);
        }
        self.state.raised.store(true, Ordering::Release);
    }

    /// Records that `step` failed with `error` after a rank of this process had begun to update, and notifies
    /// the other processes, which may not have begun.
    pub(crate) fn diverge(&self, step: StepNumber, error: &StepError) {
        let mut reasons = self.lock();
        reasons.diverged.get_or_insert(step);
        self.notify(error, &reasons);
    }

    fn notify(&self, error: &StepError, reasons: &Reasons) {
        if let Some(notify) = self.state.notify.get() {
            notify(FailureNotice {
                error: error.clone(),
                attempt: reasons.attempt,
                diverged: reasons.diverged,
            });
        }
    }

    /// Returns the failure that another process reported when the parameters diverged.
    pub(crate) fn diverged_by(&self) -> Option<StepError> {
        self.lock().diverged_by.clone()
    }

    /// Returns the step since which the ranks' parameters have diverged.
    pub(crate) fn diverged(&self) -> Option<StepNumber> {
        self.lock().diverged
    }

    /// Raises the flag for a failure that another process reports. Returns whether the failure belongs to the
    /// current attempt.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn raise_from_remote(
        &self,
        FailureNotice { error, attempt, diverged }: FailureNotice,
    ) -> bool {
        let mut reasons = self.lock();
        reasons.diverged = reasons.diverged.or(diverged);
        if diverged.is_some() {
            reasons.diverged_by.get_or_insert_with(|| error.clone());
        }
        // A process that has diverged takes part in no further attempt, so the current one cannot end.
        let attempt = if diverged.is_some() { attempt.max(reasons.attempt) } else { attempt };
        if reasons.over.is_some_and(|over| attempt <= over) {
            return false;
        }
        if attempt > reasons.attempt {
            reasons.early.get_or_insert((error, attempt));
            return false;
        }
        reasons.first.get_or_insert(error);
        self.state.raised.store(true, Ordering::Release);
        true
    }

    /// Sets the function that sends notices of this process's failures to the others.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn on_raise(&self, notify: impl Fn(FailureNotice) + Send + Sync + 'static) {
        let _ = self.state.notify.set(Box::new(notify));
    }

    /// Begins an attempt at a step. Raises the flag if another process has already failed in it.
    pub(crate) fn begin_step(&self, attempt: Attempt) {
        let mut reasons = self.lock();
        reasons.attempt = attempt;
        match reasons.early.take() {
            Some((error, early)) if early == attempt => {
                reasons.first.get_or_insert(error);
                self.state.raised.store(true, Ordering::Release);
            }
            early => reasons.early = early.filter(|(_, early)| *early > attempt),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Reasons> {
        self.state.reasons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a rank has failed. Costs one atomic load.
    pub fn is_raised(&self) -> bool {
        self.state.raised.load(Ordering::Acquire)
    }

    /// Returns the first error, if a rank has failed.
    pub fn first(&self) -> Option<StepError> {
        self.lock().first.clone()
    }

    /// Lowers the flag, for the next step.
    pub(crate) fn clear(&self) {
        let mut reasons = self.lock();
        if reasons.first.take().is_some() {
            reasons.over = Some(reasons.attempt);
        }
        self.state.raised.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::super::cause::Cause;
    use super::*;
    use crate::ids::WorldRank;

    fn error(rank: u32) -> StepError {
        StepError {
            rank: WorldRank::new(rank),
            step: StepNumber::new(3),
            action: None,
            cause: Cause::Panic { message: "out of cheese".to_owned() },
        }
    }

    #[test]
    fn the_first_cause_wins() {
        let abort = Abort::default();
        abort.raise(error(2));
        abort.raise(error(1));
        assert_eq!(abort.first().map(|first| first.rank), Some(WorldRank::new(2)));
        abort.clear();
        assert!(!abort.is_raised() && abort.first().is_none());
    }

    #[test]
    fn a_reported_failure_counts_for_its_own_attempt() {
        let notice = |step| FailureNotice {
            error: StepError { step: StepNumber::new(step), ..error(1) },
            attempt: Attempt::new(step),
            diverged: None,
        };
        let abort = Abort::default();
        abort.begin_step(Attempt::new(2));
        assert!(!abort.raise_from_remote(notice(3)), "it has not begun here");
        assert!(abort.raise_from_remote(notice(2)));
        abort.clear();
        assert!(!abort.raise_from_remote(notice(2)), "it is over here");
        assert!(!abort.is_raised());
        abort.begin_step(Attempt::new(3));
        assert_eq!(abort.first().map(|first| first.step), Some(StepNumber::new(3)));
    }

    #[test]
    fn work_of_an_attempt_that_is_over_raises_nothing() {
        let abort = Abort::default();
        abort.begin_step(Attempt::new(2));
        abort.raise_in(Attempt::new(2), error(1));
        assert!(abort.is_raised());
        abort.clear();
        abort.raise_in(Attempt::new(2), error(1));
        assert!(!abort.is_raised(), "its failure was handled");
        abort.begin_step(Attempt::new(4));
        abort.raise_in(Attempt::new(3), error(1));
        assert!(!abort.is_raised(), "a later attempt has begun");
    }

    #[test]
    fn ranks_that_have_updated_notify_those_that_have_not() {
        let [own, other] = [Abort::default(), Abort::default()];
        let notified = own.clone();
        other.on_raise(move |notice| {
            notified.raise_from_remote(notice);
        });
        for abort in [&own, &other] {
            abort.begin_step(Attempt::new(7));
        }
        // This process fails first. A later notice says that the other one had updated.
        own.raise(error(1));
        own.clear();
        assert_eq!(own.diverged(), None);
        other.diverge(StepNumber::new(3), &error(1));
        assert_eq!((own.diverged(), other.diverged()), (Some(StepNumber::new(3)), Some(StepNumber::new(3))));
        assert!(!own.is_raised(), "the attempt is over");
        // One that has begun meanwhile cannot end.
        own.begin_step(Attempt::new(8));
        other.diverge(StepNumber::new(3), &error(1));
        assert!(own.is_raised());
    }
}
