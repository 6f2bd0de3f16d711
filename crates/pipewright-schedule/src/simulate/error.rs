//! The errors of a simulation.

use thiserror::Error;

use crate::communicator::{Streams, Verdict};
use crate::costs::CostsError;
use crate::validate::Violations;

/// The errors of a simulation.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum SimulateError {
    /// No rank can advance. The sentence names the ranks that have not reached the end of their rows.
    #[error("{0}; validate the program")]
    Deadlock(String),
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
