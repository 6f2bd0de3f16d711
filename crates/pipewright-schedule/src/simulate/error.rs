//! Why a program cannot be simulated.

use thiserror::Error;

use crate::costs::CostsError;
use crate::validate::{BlockedRank, list_blocked};

/// Why a program cannot be simulated.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SimulateError {
    /// No rank can go on.
    #[error("deadlock at tick {tick}: {}; validate the program", list_blocked(.blocked))]
    Deadlock {
        /// The first tick in which no rank does anything.
        tick: u32,
        /// Every rank that has not come to its end.
        blocked: Vec<BlockedRank>,
    },
    /// No rank can go on, at whatever time.
    #[error("deadlock: {}; validate the program", list_blocked(.blocked))]
    Stuck {
        /// Every rank that has not come to its end.
        blocked: Vec<BlockedRank>,
    },
    /// The costs do not fit the program.
    #[error(transparent)]
    Costs(#[from] CostsError),
}
