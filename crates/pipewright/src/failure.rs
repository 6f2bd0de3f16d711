//! Failures of a step: their causes, and the flag that stops all ranks.
//!
//! All ranks share one [`Abort`] flag. A rank that fails raises it with the cause; the others find it raised at their next
//! wait or action and stop. The first cause is kept, and the caller gets that cause, never a consequence of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pipewright_schedule::{Action, Microbatch, StageIndex};

use crate::checkpoint::CheckpointError;
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::message::MessageError;
use crate::stage::StageError;
use crate::tensor::MetadataError;

/// A step that failed: where, and why.
#[derive(Debug, Clone, thiserror::Error)]
#[error("step {step}: rank {rank}{}: {cause}", .action.map(Where).map(|place| place.to_string()).unwrap_or_default())]
pub struct StepError {
    /// The rank that failed first.
    pub rank: WorldRank,
    /// The step, counted from 1.
    pub step: StepNumber,
    /// The rank's action; `None` after the program, unless its device failed in it.
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
    /// The stage's code or a hook panicked.
    #[error("the stage panicked: {message}")]
    Panic {
        /// The message.
        message: String,
    },
    /// The rank's device has no memory left. A device computes behind its rank, so the request may be one of an earlier
    /// action.
    #[error("the device has no memory left: {bytes} bytes were asked for")]
    DeviceMemory {
        /// The bytes that were asked for.
        bytes: u64,
    },
    /// The rank's device failed in some action of the program, which the rank noticed after it.
    #[error(
        "the device failed: {message}; it computes behind its rank, so an earlier action may be the cause"
    )]
    Device {
        /// The back end's message.
        message: String,
    },
    /// A hook around an action did not run it.
    #[error("the hook did not run {action}: a hook around an action must call `run`")]
    LeftOut {
        /// The action.
        action: Action,
    },
    /// The optimizer panicked.
    #[error("the optimizer panicked: {message}")]
    Update {
        /// The message.
        message: String,
    },
    /// The stage does not take the tensors that arrived.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// A stage sent tensors that the next stage does not expect.
    #[error(transparent)]
    Metadata(#[from] Box<MetadataError>),
    /// A message of another rank cannot be used.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The stage could not be made.
    #[error("the stage cannot be made: {message}")]
    Build {
        /// The message of the code that makes it.
        message: String,
    },
    /// A checkpoint could not be restored.
    #[error("stage {stage}: {error}")]
    Restore {
        /// The stage.
        stage: StageIndex,
        /// The cause.
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
        /// The stage that computed it.
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
    /// Two parameters have one path, and a stage that holds it does not declare it as shared.
    #[error(
        "stages {} and {} each have a parameter `{parameter}`, and stage {undeclared} does not declare it as shared: give \
         different parameters different paths (`StageModule::parameter_path`, or `Stage::with_prefix`); if it is one \
         parameter, name its path in `StageModule::shared_parameters` of both", .stages.0, .stages.1
    )]
    EqualPaths {
        /// The path.
        parameter: Arc<str>,
        /// The stages; twice the same one if it has both.
        stages: (StageIndex, StageIndex),
        /// The first stage that does not declare the path.
        undeclared: StageIndex,
    },
    /// Two stages share a parameter but hold it with different shapes.
    #[error(
        "stages {} and {} share the parameter `{parameter}`, but hold it with shapes {:?} and {:?}: give different \
         parameters different paths (`StageModule::parameter_path`)",
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
    /// Two copies of a shared parameter have different initial values.
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
    /// No rank made progress for the whole deadline.
    #[error("no rank has moved for {:.1} s\n{report}", .waited.as_secs_f64())]
    Deadline {
        /// The deadline.
        waited: Duration,
        /// One line per rank: its last actions and what it waits for.
        report: String,
    },
    /// A rank's process sends no heartbeats.
    #[error("rank {peer} has not been heard of for {:.1} s: its process is gone, stopped, or cut off\n{report}", .waited.as_secs_f64())]
    SilentPeer {
        /// The rank.
        peer: WorldRank,
        /// The deadline.
        waited: Duration,
        /// As in [`Cause::Deadline`].
        report: String,
    },
    /// The transport failed.
    #[error("the transport failed: {message}")]
    Transport {
        /// The message.
        message: String,
    },
    /// A failure that another process reported.
    #[error("{message}")]
    Remote {
        /// The other process's message.
        message: String,
    },
    /// A rank's thread or process has ended.
    #[error("rank {peer} is gone: its thread or process has ended")]
    LostPeer {
        /// The rank that has ended.
        peer: WorldRank,
    },
    /// The program that owns the pipeline cannot continue.
    #[error("the run cannot continue: {message}")]
    Abandoned {
        /// Why.
        message: String,
    },
    /// Another rank failed first. Only ranks see this cause; the caller gets the first one.
    #[error("aborted because rank {first} failed")]
    Aborted {
        /// The rank that failed first.
        first: WorldRank,
    },
}

impl Cause {
    /// Returns the cause for a panic's payload.
    pub(crate) fn from_panic(payload: &(dyn std::any::Any + Send)) -> Self {
        let message = payload
            .downcast_ref::<&str>()
            .map(|message| (*message).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "(no message)".to_owned());
        match device_memory(&message) {
            Some(bytes) => Self::DeviceMemory { bytes },
            None => Self::Panic { message },
        }
    }
}

/// Returns the bytes that a device could not provide, if that is what a back end's message says. Burn reports a failure
/// of a device only as the text of a panic.
fn device_memory(message: &str) -> Option<u64> {
    const WORDS: [&str; 2] = ["out of device memory allocating ", "can't allocate buffer of size: "];
    let rest = WORDS.iter().find_map(|words| Some(message.split_once(words)?.1))?;
    let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

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

/// The reasons for the flag. Processes end a failed step at different times, so a failure that another process reports may
/// belong to an attempt that is over here, or to one that has not begun.
#[derive(Debug, Default)]
struct Reasons {
    first: Option<StepError>,
    /// The current attempt at a step. Attempts never decrease, unlike step numbers, which a restore may reset.
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
        let mut reasons = self.lock();
        if reasons.first.is_none() {
            tracing::error!(%error, "a step failed");
            self.notify(&error, &reasons);
            reasons.first = Some(error);
        }
        self.state.raised.store(true, Ordering::Release);
    }

    /// Records that `step` failed with `error` after a rank of this process had begun to update, and notifies the other
    /// processes, which may not have begun.
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

    /// Raises the flag for a failure that another process reports. Returns whether the failure belongs to the current
    /// attempt.
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

    /// Whether a rank has failed. Costs one atomic load.
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
    use super::*;

    fn error(rank: u32, action: Option<&str>) -> StepError {
        StepError {
            rank: WorldRank::new(rank),
            step: StepNumber::new(3),
            action: action.map(|text| text.parse().expect("an action")),
            cause: Cause::Panic { message: "out of cheese".to_owned() },
        }
    }

    #[test]
    fn a_device_without_memory_is_told_from_other_panics() {
        let cause = |message: &str| Cause::from_panic(&message.to_owned()).to_string();
        let read = "Error while reading data: WithContext { reason: out of device memory allocating 4096 bytes\n0: f }";
        let expected = "the device has no memory left: 4096 bytes were asked for";
        assert_eq!(cause(read), expected);
        assert_eq!(cause("can't allocate buffer of size: 4096\n"), expected);
        assert_eq!(cause("out of cheese"), "the stage panicked: out of cheese");
    }

    #[test]
    fn the_first_cause_wins() {
        let abort = Abort::default();
        abort.raise(error(2, None));
        abort.raise(error(1, None));
        assert_eq!(abort.first().map(|first| first.rank), Some(WorldRank::new(2)));
        abort.clear();
        assert!(!abort.is_raised() && abort.first().is_none());
    }

    #[test]
    fn a_reported_failure_counts_for_its_own_attempt() {
        let notice = |step| FailureNotice {
            error: StepError { step: StepNumber::new(step), ..error(1, None) },
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
        own.raise(error(1, None));
        own.clear();
        assert_eq!(own.diverged(), None);
        other.diverge(StepNumber::new(3), &error(1, None));
        assert_eq!((own.diverged(), other.diverged()), (Some(StepNumber::new(3)), Some(StepNumber::new(3))));
        assert!(!own.is_raised(), "the attempt is over");
        // One that has begun meanwhile cannot end.
        own.begin_step(Attempt::new(8));
        other.diverge(StepNumber::new(3), &error(1, None));
        assert!(own.is_raised());
    }

    #[test]
    fn an_error_names_its_place_and_cause() {
        assert_eq!(
            error(1, Some("1F3")).to_string(),
            "step 3: rank 1, stage 1, microbatch 3, action 1F3: the stage panicked: out of cheese"
        );
        assert_eq!(error(1, None).to_string(), "step 3: rank 1: the stage panicked: out of cheese");
    }
}
