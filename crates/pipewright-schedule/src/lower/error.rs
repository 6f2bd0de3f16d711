//! The errors of lowering.

use std::num::NonZeroU32;

use thiserror::Error;

use crate::ids::Rank;
use crate::schedule::ScheduleError;
use crate::validate::{BlockedRank, Violations, list_blocked};
use crate::words::counted;

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
    /// The program already communicates.
    #[error("the program already communicates; add sends and receives only once")]
    AlreadyCommunicates,
    /// A rank looks further ahead than the window of gathered stages reaches.
    #[error(
        "rank {rank} has a lookahead of {lookahead} stages, and the window has {window}; use a lookahead from 1 to {window}"
    )]
    Lookahead {
        /// The rank.
        rank: Rank,
        /// Its lookahead.
        lookahead: NonZeroU32,
        /// The stages of the window.
        window: NonZeroU32,
    },
    /// The list of lookaheads has another length than the list of ranks.
    #[error("{} for {}; give one for each rank, or one number for all", counted(*.found, "lookahead"), counted(*.ranks, "rank"))]
    LookaheadRanks {
        /// The number of lookaheads.
        found: usize,
        /// The number of ranks.
        ranks: u32,
    },
}

crate::error_text::message_as_debug!(LowerError);
