//! The errors of lowering.

use thiserror::Error;

use crate::schedule::ScheduleError;
use crate::validate::{BlockedRank, Violations, list_blocked};

/// The errors of lowering.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum LowerError {
    /// The program is unsound after a pass. After the first pass, the schedule itself is unsound.
    #[error("after the pass `{pass}`: {violations}")]
    Unsound {
        /// The pass.
        pass: &'static str,
        /// All violations.
        violations: Violations,
    },
    /// The ranks wait for each other, so that there is no order of messages.
    #[error("no rank can continue: {}; correct the order of the schedule", list_blocked(.blocked))]
    Stuck {
        /// Every rank that has not reached the end of its row.
        blocked: Vec<BlockedRank>,
    },
    /// The rows do not fit together.
    #[error(transparent)]
    Rows(#[from] ScheduleError),
    /// The lowered program is unsound.
    #[error(transparent)]
    Invalid(#[from] Violations),
    /// The passes do not fit the program or each other, or their text is wrong.
    #[error("{0}")]
    Refused(String),
}

crate::error_text::message_as_debug!(LowerError);
