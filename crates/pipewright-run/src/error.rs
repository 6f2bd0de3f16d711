//! [`RunError`]: the error of a run, and of reading what a run has written.

use pipewright::ids::WorldRank;
use pipewright_system::failure::Failure;

use crate::fault::Fault;

pub use pipewright_system::failure::{ErrorKind, MOST_PROBLEMS, more_problems};

/// The reason why a run ends without success. Its text says where and why, with all causes.
pub type RunError = Failure;

/// The facts that a run adds to its error.
#[derive(Clone, Default)]
struct RunFailure {
    lost: Option<WorldRank>,
    fault: Option<Fault>,
}

/// The rank that a run has lost, and the fault after which it may continue.
pub trait FailedRun: Sized {
    /// Returns the same error as the loss of a rank.
    fn loss_of(self, lost: Option<WorldRank>) -> Self;

    /// Returns the same error as a fault, after which the run may continue; `None` if it may not.
    fn with_fault(self, fault: Option<Fault>) -> Self;

    /// Returns the fault after which the run may continue, if the error is one.
    fn fault(&self) -> Option<&Fault>;

    /// Returns the lost rank, if the error is the loss of a rank.
    fn lost(&self) -> Option<WorldRank>;
}

impl FailedRun for RunError {
    fn loss_of(self, lost: Option<WorldRank>) -> Self {
        let failure = RunFailure { lost, ..failure_of(&self) };
        self.with_detail(failure)
    }

    fn with_fault(self, fault: Option<Fault>) -> Self {
        let failure = RunFailure { fault, ..failure_of(&self) };
        self.with_detail(failure)
    }

    fn fault(&self) -> Option<&Fault> {
        self.detail::<RunFailure>()?.fault.as_ref()
    }

    fn lost(&self) -> Option<WorldRank> {
        self.detail::<RunFailure>()?.lost
    }
}

fn failure_of(error: &RunError) -> RunFailure {
    error.detail::<RunFailure>().cloned().unwrap_or_default()
}
