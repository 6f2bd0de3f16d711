//! Why a schedule cannot be lowered.

use thiserror::Error;

use crate::schedule::ScheduleError;
use crate::validate::{BlockedRank, Violations, list_blocked};

/// Why a schedule cannot be lowered.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LowerError {
    /// The program is unsound after a pass. After the first pass it is the schedule that is at fault.
    #[error("after the pass `{pass}`: {violations}")]
    Unsound {
        /// The pass.
        pass: &'static str,
        /// What is wrong.
        violations: Violations,
    },
    /// The ranks wait for each other, so that no order of messages serves them.
    #[error("no rank can go on: {}; correct the order of the schedule", list_blocked(.blocked))]
    Stuck {
        /// Every rank that has not come to its end.
        blocked: Vec<BlockedRank>,
    },
    /// The rows do not fit together.
    #[error(transparent)]
    Rows(#[from] ScheduleError),
    /// The lowered program is unsound.
    #[error(transparent)]
    Invalid(#[from] Violations),
    /// The program sends or receives already.
    #[error("the program communicates already; add sends and receives only once")]
    AlreadyCommunicates,
}
