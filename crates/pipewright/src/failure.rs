//! What can go wrong in a step, who saw it first, and how the other ranks learn of it.
//!
//! The first cause wins: every rank shares one [`Abort`]. Whoever fails raises it with the cause; everybody else finds
//! it raised at their next wait or action and stops. The caller gets the cause, never an echo of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pipewright_schedule::{Action, Microbatch, Rank, StageIndex};

use crate::checkpoint::CheckpointError;
use crate::message::MessageError;
use crate::stage::StageError;
use crate::tensor::MetadataError;

/// A step that failed: where, and why.
#[derive(Debug, Clone, thiserror::Error)]
#[error("step {step}: rank {rank}{}: {cause}", .action.map(Where).map(|place| place.to_string()).unwrap_or_default())]
pub struct StepError {
    /// The rank that failed first.
    pub rank: Rank,
    /// The step, counted from 1.
    pub step: u64,
    /// What the rank was doing; none between the program and the optimizer.
    pub action: Option<Action>,
    /// Why it failed.
    #[source]
    pub cause: Cause,
}

/// An action spelled out: `, stage 2, microbatch 5, action 2F5`.
struct Where(Action);

impl std::fmt::Display for Where {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, ", stage {}", self.0.stage())?;
        if let Some(microbatch) = self.0.microbatch() {
            write!(f, ", microbatch {microbatch}")?;
        }
        write!(f, ", action {}", self.0)
    }
}

/// Why a rank failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The stage's own code panicked, or a hook around it.
    #[error("the stage panicked: {message}")]
    Panic {
        /// What it said.
        message: String,
    },
    /// A hook around an action did not run it.
    #[error("the hook did not run {action}: what stands around an action must call `run` for it")]
    LeftOut {
        /// The action.
        action: Action,
    },
    /// The optimizer panicked.
    #[error("the optimizer panicked: {message}")]
    Update {
        /// What it said.
        message: String,
    },
    /// The stage was handed tensors that it does not take.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// A stage sent other tensors than the next one expects.
    #[error(transparent)]
    Metadata(#[from] Box<MetadataError>),
    /// A message of another rank cannot be used.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The stage could not be made.
    #[error("the stage cannot be made: {message}")]
    Build {
        /// What its maker said.
        message: String,
    },
    /// A checkpoint could not be taken over.
    #[error("stage {stage}: {error}")]
    Restore {
        /// The stage.
        stage: StageIndex,
        /// Why not.
        #[source]
        error: Arc<CheckpointError>,
    },
    /// A microbatch's loss is infinite or not a number. The parameters are those before the step.
    #[error(
        "the loss of microbatch {microbatch} is {loss}; the parameters are still those before this step: lower the \
         learning rate, clip gradients, or look at the data of this step"
    )]
    LossNotFinite {
        /// The first such microbatch.
        microbatch: Microbatch,
        /// Its loss.
        loss: f64,
    },
    /// An auxiliary loss is infinite or not a number. The parameters are those before the step.
    #[error(
        "the auxiliary loss `{name}` of stage {stage} and microbatch {microbatch} is {loss}; the parameters are still \
         those before this step"
    )]
    AuxiliaryNotFinite {
        /// The stage that it comes from.
        stage: StageIndex,
        /// The first such microbatch.
        microbatch: Microbatch,
        /// Its name.
        name: Arc<str>,
        /// Its value.
        loss: f64,
    },
    /// A parameter's gradient is infinite or not a number. The parameters are those before the step.
    #[error(
        "the gradient of `{parameter}` is not finite; the parameters are still those before this step: lower the \
         learning rate, or look at the data of this step"
    )]
    GradientNotFinite {
        /// The first such parameter, by path.
        parameter: Arc<str>,
    },
    /// Two stages hold a parameter of one path with different shapes.
    #[error(
        "stages {} and {} share the parameter `{parameter}`, but hold it with shapes {:?} and {:?}: give parameters \
         that are not the same different paths (`StageModule::parameter_path`)",
        .stages.0, .stages.1, .shapes.0, .shapes.1
    )]
    SharedShape {
        /// The path.
        parameter: Arc<str>,
        /// The first owner and one that differs from it.
        stages: (StageIndex, StageIndex),
        /// Their shapes.
        shapes: (Vec<usize>, Vec<usize>),
    },
    /// Two copies of a shared parameter do not start equal.
    #[error(
        "stages {} and {} share the parameter `{parameter}`, but their copies differ: copies must start with the same \
         values", .stages.0, .stages.1
    )]
    SharedValues {
        /// The path.
        parameter: Arc<str>,
        /// The first owner and one that differs from it.
        stages: (StageIndex, StageIndex),
    },
    /// Nothing moved on any rank for the whole deadline.
    #[error("no rank has moved for {:.1} s\n{report}", .waited.as_secs_f64())]
    Deadline {
        /// The deadline.
        waited: Duration,
        /// Each rank's last actions and what it waits for, a line a rank.
        report: String,
    },
    /// A rank's process gives no sign of life.
    #[error("rank {peer} has not been heard of for {:.1} s: its process is gone, stopped, or cut off\n{report}", .waited.as_secs_f64())]
    SilentPeer {
        /// The rank.
        peer: Rank,
        /// The deadline.
        waited: Duration,
        /// As in [`Cause::Deadline`].
        report: String,
    },
    /// The transport failed.
    #[error("the transport failed: {message}")]
    Transport {
        /// What it said.
        message: String,
    },
    /// What another process said of its failure.
    #[error("{message}")]
    Told {
        /// Its words.
        message: String,
    },
    /// A rank's thread or process is gone.
    #[error("rank {peer} is gone: its thread or process has ended")]
    LostPeer {
        /// The rank that is gone.
        peer: Rank,
    },
    /// Whoever drives the run cannot go on.
    #[error("the run cannot go on: {message}")]
    Abandoned {
        /// Why.
        message: String,
    },
    /// Another rank failed first. Kept to that rank's peers: the caller sees the first cause.
    #[error("aborted because rank {first} failed")]
    Aborted {
        /// The rank that failed first.
        first: Rank,
    },
}

impl Cause {
    /// What a panic said, from its payload.
    pub(crate) fn from_panic(payload: &(dyn std::any::Any + Send)) -> Self {
        let message = payload
            .downcast_ref::<&str>()
            .map(|message| (*message).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "(no message)".to_owned());
        Self::Panic { message }
    }
}

/// The flag that stops every rank, and the first reason to raise it.
#[derive(Clone, Debug, Default)]
pub struct Abort {
    state: Arc<AbortState>,
}

#[derive(Default)]
struct AbortState {
    raised: AtomicBool,
    reasons: Mutex<Reasons>,
    /// Tells other processes.
    tell: OnceLock<Tell>,
}

/// Takes a failure, the attempt that failed, and the step since which the ranks do not belong together.
type Tell = Box<dyn Fn(&StepError, u64, Option<u64>) + Send + Sync>;

/// Why the flag is raised. Processes end a failed step at different times, so a failure told by another one may be of
/// an attempt that is over here, or of one that has not begun.
#[derive(Debug, Default)]
struct Reasons {
    first: Option<StepError>,
    /// The attempt at a step that is under way: a number that never goes back, unlike that of the step.
    attempt: u64,
    /// The last attempt whose failure was dealt with.
    over: Option<u64>,
    /// A failure of an attempt to come.
    early: Option<(StepError, u64)>,
    /// A step that failed after some ranks had begun to update, here or in another process.
    diverged: Option<u64>,
}

impl std::fmt::Debug for AbortState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AbortState").field("reasons", &self.reasons).finish_non_exhaustive()
    }
}

impl Abort {
    /// Raises the flag; the first error raised is kept, later ones are dropped.
    pub fn raise(&self, error: StepError) {
        let mut reasons = self.lock();
        if reasons.first.is_none() {
            tracing::error!(%error, "a step failed");
            if let Some(tell) = self.state.tell.get() {
                tell(&error, reasons.attempt, reasons.diverged);
            }
            reasons.first = Some(error);
        }
        self.state.raised.store(true, Ordering::Release);
    }

    /// Notes that `step` failed, as `error` says, after a rank of this process had begun to update. Those of other
    /// processes may not have: they are told.
    pub(crate) fn diverge(&self, step: u64, error: &StepError) {
        let mut reasons = self.lock();
        reasons.diverged.get_or_insert(step);
        if let Some(tell) = self.state.tell.get() {
            tell(error, reasons.attempt, reasons.diverged);
        }
    }

    /// The step since which the ranks' parameters do not belong together.
    pub(crate) fn diverged(&self) -> Option<u64> {
        self.lock().diverged
    }

    /// As [`Abort::raise`], for what another process tells of its step; whether the flag is raised for it.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn raise_told(&self, error: StepError, attempt: u64, diverged: Option<u64>) -> bool {
        let mut reasons = self.lock();
        reasons.diverged = reasons.diverged.or(diverged);
        // Whoever has updated takes part in no further attempt: one that is under way here cannot end.
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

    /// Has every failure of this process told to `tell`.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn on_raise(&self, tell: impl Fn(&StepError, u64, Option<u64>) + Send + Sync + 'static) {
        let _ = self.state.tell.set(Box::new(tell));
    }

    /// An attempt at a step begins; if another process has failed in it already, the flag is raised.
    pub(crate) fn begin_step(&self, attempt: u64) {
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

    /// Whether somebody failed. Cheap: one atomic load.
    pub fn is_raised(&self) -> bool {
        self.state.raised.load(Ordering::Acquire)
    }

    /// The first error, if somebody failed.
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
    use super::*;

    fn error(rank: u32, action: Option<&str>) -> StepError {
        StepError {
            rank: Rank::new(rank),
            step: 3,
            action: action.map(|text| text.parse().expect("an action")),
            cause: Cause::Panic { message: "out of cheese".to_owned() },
        }
    }

    #[test]
    fn the_first_cause_wins() {
        let abort = Abort::default();
        abort.raise(error(2, None));
        abort.raise(error(1, None));
        assert_eq!(abort.first().map(|first| first.rank), Some(Rank::new(2)));
        abort.clear();
        assert!(!abort.is_raised() && abort.first().is_none());
    }

    #[test]
    fn what_another_process_tells_counts_for_its_step_alone() {
        let told = |step| StepError { step, ..error(1, None) };
        let abort = Abort::default();
        abort.begin_step(2);
        assert!(!abort.raise_told(told(3), 3, None), "it has not begun here");
        assert!(abort.raise_told(told(2), 2, None));
        abort.clear();
        assert!(!abort.raise_told(told(2), 2, None), "it is over here");
        assert!(!abort.is_raised());
        abort.begin_step(3);
        assert_eq!(abort.first().map(|first| first.step), Some(3));
    }

    #[test]
    fn who_has_not_updated_is_told_by_who_has() {
        let [own, other] = [Abort::default(), Abort::default()];
        let told = own.clone();
        other.on_raise(move |error, attempt, diverged| {
            told.raise_told(error.clone(), attempt, diverged);
        });
        for abort in [&own, &other] {
            abort.begin_step(7);
        }
        // This process fails first, and is told afterwards that the other one had updated.
        own.raise(error(1, None));
        own.clear();
        assert_eq!(own.diverged(), None);
        other.diverge(3, &error(1, None));
        assert_eq!((own.diverged(), other.diverged()), (Some(3), Some(3)));
        assert!(!own.is_raised(), "the attempt is over");
        // One that has begun meanwhile cannot end.
        own.begin_step(8);
        other.diverge(3, &error(1, None));
        assert!(own.is_raised());
    }

    #[test]
    fn an_error_says_where_and_what() {
        assert_eq!(
            error(1, Some("1F3")).to_string(),
            "step 3: rank 1, stage 1, microbatch 3, action 1F3: the stage panicked: out of cheese"
        );
        assert_eq!(error(1, None).to_string(), "step 3: rank 1: the stage panicked: out of cheese");
    }
}
