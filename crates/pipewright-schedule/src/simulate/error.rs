//! The errors of a simulation.

use thiserror::Error;

use crate::costs::CostsError;
use crate::validate::{BlockedRank, list_blocked};

/// The errors of a simulation.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum SimulateError {
    /// No rank can advance, in the logical simulation.
    #[error("deadlock at tick {tick}: {}; validate the program", list_blocked(.blocked))]
    Deadlock {
        /// The first tick in which no rank acts.
        tick: u32,
        /// Every rank that has not reached the end of its row.
        blocked: Vec<BlockedRank>,
    },
    /// No rank can advance, in the timed simulation.
    #[error("deadlock: {}; validate the program", list_blocked(.blocked))]
    Stuck {
        /// Every rank that has not reached the end of its row.
        blocked: Vec<BlockedRank>,
    },
    /// The costs do not fit the program.
    #[error(transparent)]
    Costs(#[from] CostsError),
}

crate::error_text::message_as_debug!(SimulateError);
