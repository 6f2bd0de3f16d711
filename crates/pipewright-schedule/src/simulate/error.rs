//! The errors of a simulation.

use thiserror::Error;

use crate::communicator::{Streams, Verdict};
use crate::costs::CostsError;
use crate::validate::{BlockedRank, Violations, list_blocked};

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
    /// The program is not sound on the communicator.
    #[error("on the transport {streams}, the program {}", fault(.verdict))]
    Unsound {
        /// The queues of the communicator.
        streams: Streams,
        /// The messages that are crossed, or the actions that wait for each other.
        verdict: Box<Verdict>,
    },
    /// Actions of the program are missing or misplaced, whatever the communicator.
    #[error(transparent)]
    Incomplete(#[from] Violations),
    /// The costs do not fit the program.
    #[error(transparent)]
    Costs(#[from] CostsError),
}

crate::error_text::message_as_debug!(SimulateError);

/// Returns what is wrong with a program, after its subject.
fn fault(verdict: &Verdict) -> String {
    let fault = match (verdict.crossed > 0, verdict.cycle.is_empty()) {
        (true, true) => "has crossed messages",
        (true, false) => "has crossed messages and may hang",
        (false, _) => "may hang",
    };
    let reason = verdict.reason().unwrap_or_default();
    format!(
        "{fault}: {reason}; `pipewright lower FILE.csv --pass order-safe` orders the messages of a file, if an order exists"
    )
}
