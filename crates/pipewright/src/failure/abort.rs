//! The flag that stops all ranks of a process, with the first cause, and the notices for other processes.
//!
//! The ranks of a process may be in two consecutive attempts at the same time. A failure of an attempt stops
//! the ranks that are in it or in a later one. Ranks that are in an earlier attempt continue: nothing in it has
//! failed. A failure of a whole process, such as the loss of another one, stops all ranks of all processes:
//! the process completes no earlier attempt either. It is the cause for the ranks whose attempt has not failed
//! itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::cause::Cause;
use super::step_error::StepError;
use crate::ids::{Attempt, StepNumber};

/// The flag that stops every rank, with the first cause. Raising it wakes the ranks that wait for a message.
#[derive(Clone, Debug, Default)]
pub struct Abort {
    state: Arc<AbortState>,
}

#[derive(Default)]
struct AbortState {
    /// 0 if nothing has failed; otherwise 1 more than the first attempt that is stopped.
    raised: AtomicU64,
    reasons: Mutex<Reasons>,
    /// Wakes the ranks that wait for a message; `None` if none waits.
    wake: Option<Wake>,
    /// Sends notices to the other processes.
    notify: OnceLock<Notify>,
}

type Wake = Box<dyn Fn() + Send + Sync>;
type Notify = Box<dyn Fn(FailureNotice) + Send + Sync>;

/// A failure as one process reports it to another.
#[derive(Clone, Debug)]
#[cfg_attr(not(any(feature = "mpi", test)), expect(dead_code, reason = "only MPI reads notices"))]
pub(crate) struct FailureNotice {
    pub(crate) error: StepError,
    /// The attempt that failed.
    pub(crate) attempt: Attempt,
    /// Whether the whole process failed, so that it completes no earlier attempt either.
    pub(crate) stops_all: bool,
    /// The step since which the ranks' parameters have diverged; `None` if no rank had begun to update.
    pub(crate) diverged: Option<StepNumber>,
}

/// A step that failed after some rank had begun to update, in this or another process.
#[derive(Clone, Debug)]
pub(crate) struct Divergence {
    pub(crate) step: StepNumber,
    /// The failure that was first reported with it.
    pub(crate) first: StepError,
}

/// The reasons for the flag. Processes end a failed step at different times, so a failure that another
/// process reports may belong to an attempt that has ended in this process, or to one that has not begun.
#[derive(Debug, Default)]
struct Reasons {
    /// The first failure of the first attempt that failed, with the attempt.
    first: Option<(StepError, Attempt)>,
    /// The first failure of this whole process or of another one.
    whole: Option<StepError>,
    /// The current attempt at a step. Attempts never decrease, unlike step numbers, which a restore may
    /// reset.
    attempt: Attempt,
    /// The earliest attempt that runs on a rank. Two attempts may run at once.
    earliest: Attempt,
    /// The last attempt whose failure was handled.
    over: Option<Attempt>,
    /// A failure of a later attempt.
    early: Option<(StepError, Attempt)>,
    /// Since when the ranks' parameters have diverged.
    diverged: Option<Divergence>,
}

impl std::fmt::Debug for AbortState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AbortState").field("reasons", &self.reasons).finish_non_exhaustive()
    }
}

impl Reasons {
    /// Keeps a failure of an attempt if nothing has stopped the attempt before. Returns whether that is so.
    /// Ranks that stop because of an earlier failure fail too.
    fn keep_first(&mut self, attempt: Attempt, error: &StepError) -> bool {
        let is_first = self.cause_in(attempt).is_none();
        if is_first {
            self.first = Some((error.clone(), attempt));
        }
        is_first
    }

    /// Returns the cause for which ranks in `attempt` stop.
    fn cause_in(&self, attempt: Attempt) -> Option<&StepError> {
        let own = self.first.as_ref().filter(|(_, first)| *first <= attempt).map(|(error, _)| error);
        own.or(self.whole.as_ref())
    }

    fn diverged_step(&self) -> Option<StepNumber> {
        self.diverged.as_ref().map(|diverged| diverged.step)
    }
}

impl Abort {
    /// Returns a flag that calls `wake` whenever it is raised.
    pub(crate) fn waking(wake: impl Fn() + Send + Sync + 'static) -> Self {
        let state = AbortState { wake: Some(Box::new(wake)), ..AbortState::default() };
        Self { state: Arc::new(state) }
    }

    /// Raises the flag in all attempts. The first error is kept, later ones are dropped. The other processes get
    /// a notice also if an attempt has failed before: it stops that attempt alone, and this process takes part
    /// in no later one either.
    pub fn raise(&self, error: StepError) {
        let mut reasons = self.lock();
        if reasons.whole.is_none() {
            reasons.whole = Some(error.clone());
            let diverged = reasons.diverged_step();
            if let Some((error, attempt)) = reasons.first.clone() {
                // If the transport has failed, this notice may have been lost with it.
                self.notify(FailureNotice { error, attempt, stops_all: false, diverged });
            }
            let attempt = reasons.attempt;
            self.announce(FailureNotice { error, attempt, stops_all: true, diverged });
        }
        self.show(reasons);
    }

    /// Raises the flag in `attempt` and in later ones. The first error of the first attempt that fails is kept.
    pub(crate) fn raise_from(&self, attempt: Attempt, error: StepError) {
        self.raise_first(self.lock(), attempt, &error);
    }

    /// Like [`Abort::raise_from`], but only if `attempt` is not over. Work that a failed step has left behind
    /// may fail later, which does not concern the next one.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn raise_in(&self, attempt: Attempt, error: &StepError) {
        let reasons = self.lock();
        if attempt >= reasons.earliest && reasons.over.is_none_or(|over| attempt > over) {
            self.raise_first(reasons, attempt, error);
        }
    }

    fn raise_first(&self, mut reasons: MutexGuard<'_, Reasons>, attempt: Attempt, error: &StepError) {
        if reasons.keep_first(attempt, error) {
            let (error, diverged) = (error.clone(), reasons.diverged_step());
            self.announce(FailureNotice { error, attempt, stops_all: false, diverged });
        }
        self.show(reasons);
    }

    /// Logs a failure, and notifies the other processes.
    fn announce(&self, notice: FailureNotice) {
        let error = &notice.error;
        // Such a step is usually computed again. If it is not, the pipeline returns the error.
        if matches!(error.cause, Cause::Suspicious { .. } | Cause::Unconfirmed { .. }) {
            tracing::warn!(%error, "a step is suspicious");
        } else if matches!(error.cause, Cause::Search { .. }) {
            tracing::debug!(%error, "a step that failed was computed again");
        } else {
            tracing::error!(%error, "a step failed");
        }
        self.notify(notice);
    }

    /// Raises or lowers the flag as the reasons say. If it is raised, wakes the ranks.
    fn show(&self, reasons: MutexGuard<'_, Reasons>) {
        let first = reasons.first.as_ref().map(|(_, attempt)| *attempt);
        let stopped = reasons.whole.as_ref().map(|_| Attempt::default()).or(first);
        self.state.raised.store(stopped.map_or(0, |attempt| attempt.next().get()), Ordering::Release);
        drop(reasons);
        if let (Some(_), Some(wake)) = (stopped, &self.state.wake) {
            wake();
        }
    }

    /// Records that `step` failed with `error` after a rank of this process had begun to update, and notifies
    /// the other processes, which may not have begun.
    pub(crate) fn diverge(&self, step: StepNumber, error: &StepError) {
        let mut reasons = self.lock();
        let own = || Divergence { step, first: error.clone() };
        let Divergence { step, first: error } = reasons.diverged.get_or_insert_with(own).clone();
        let (attempt, diverged) = (reasons.attempt, Some(step));
        self.notify(FailureNotice { error, attempt, stops_all: false, diverged });
    }

    fn notify(&self, notice: FailureNotice) {
        if let Some(notify) = self.state.notify.get() {
            notify(notice);
        }
    }

    /// Returns since when the ranks' parameters have diverged, and why.
    pub(crate) fn diverged(&self) -> Option<Divergence> {
        self.lock().diverged.clone()
    }

    /// Raises the flag for a failure that another process reports. If the whole process has failed, it takes
    /// part in no attempt, so the flag is raised in all of them. Otherwise nothing happens if the attempt is
    /// over, and the flag is raised later if the attempt has not begun.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn raise_from_remote(&self, notice: FailureNotice) {
        let FailureNotice { error, attempt, stops_all, diverged } = notice;
        let mut reasons = self.lock();
        if let Some(step) = diverged {
            reasons.diverged.get_or_insert_with(|| Divergence { step, first: error.clone() });
        }
        // A process that has diverged takes part in no further attempt, so the current one cannot end.
        let attempt = if diverged.is_some() { attempt.max(reasons.attempt) } else { attempt };
        if stops_all {
            reasons.whole.get_or_insert(error);
        } else if reasons.over.is_some_and(|over| attempt <= over) {
            return;
        } else if attempt > reasons.attempt {
            // The first of the attempts counts: it stops the later ones too.
            reasons.early =
                reasons.early.take().filter(|(_, early)| *early <= attempt).or(Some((error, attempt)));
            return;
        } else {
            reasons.keep_first(attempt, &error);
        }
        self.show(reasons);
    }

    /// Sets the function that sends notices of this process's failures to the others.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn on_raise(&self, notify: impl Fn(FailureNotice) + Send + Sync + 'static) {
        let _ = self.state.notify.set(Box::new(notify));
    }

    /// Begins an attempt at a step on a rank. Raises the flag if another process has already failed in it.
    pub(crate) fn begin_step(&self, attempt: Attempt) {
        self.begin_next(attempt, attempt);
    }

    /// Like [`Abort::begin_step`], while the rank may run an earlier attempt. `earliest` is the first one that it runs.
    pub(crate) fn begin_next(&self, attempt: Attempt, earliest: Attempt) {
        let mut reasons = self.lock();
        reasons.earliest = earliest;
        // Another rank may be ahead.
        reasons.attempt = reasons.attempt.max(attempt);
        match reasons.early.take() {
            Some((error, early)) if early == attempt => {
                reasons.keep_first(early, &error);
                self.show(reasons);
            }
            early => reasons.early = early.filter(|(_, early)| *early > attempt),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Reasons> {
        self.state.reasons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a rank has failed, in any attempt. Costs one atomic load.
    pub fn is_raised(&self) -> bool {
        self.is_raised_in(Attempt::new(u64::MAX))
    }

    /// Returns whether a rank has failed in `attempt` or before. Costs one atomic load.
    pub(crate) fn is_raised_in(&self, attempt: Attempt) -> bool {
        let raised = self.state.raised.load(Ordering::Acquire);
        raised.checked_sub(1).is_some_and(|first| first <= attempt.get())
    }

    /// Returns the first error, if a rank has failed.
    pub fn first(&self) -> Option<StepError> {
        self.first_in(Attempt::new(u64::MAX))
    }

    /// Returns the first error, if a rank has failed in `attempt` or before.
    pub(crate) fn first_in(&self, attempt: Attempt) -> Option<StepError> {
        self.lock().cause_in(attempt).cloned()
    }

    /// Lowers the flag, for the next step.
    #[cfg(any(feature = "testing", test))]
    pub(crate) fn clear(&self) {
        let _ = self.clear_in(Attempt::new(u64::MAX));
    }

    /// Lowers the flag if a rank has failed in `attempt` or before, and returns the cause. All attempts that
    /// have begun are over then. A failure of a whole process that is not the cause remains: it stops the next
    /// attempt, in which this process would otherwise wait for the other one until the deadline.
    pub(crate) fn clear_in(&self, attempt: Attempt) -> Option<StepError> {
        let mut reasons = self.lock();
        let cause = reasons.cause_in(attempt).cloned();
        if cause.is_some() {
            let is_of_attempt = reasons.first.take().is_some_and(|(_, first)| first <= attempt);
            if !is_of_attempt {
                reasons.whole = None;
            }
            reasons.over = Some(reasons.attempt);
        }
        self.show(reasons);
        cause
    }
}

#[cfg(test)]
mod tests;
