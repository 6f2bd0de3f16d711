//! A rank's endpoint, which its executor and its stages share, and how long a rank waits for a message.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::failure::Cause;
use crate::progress::ProgressBoard;
use crate::transport::{Endpoint, Waited};

/// How long a rank waits before it checks whether other ranks make progress.
const SHORT_WAIT: Duration = Duration::from_millis(10);

/// How often a rank that waits longer checks for progress. The pipeline gives a rank up that does not answer a quarter of a second
/// after the deadline, so a rank notices the deadline itself before then.
const LOOK: Duration = Duration::from_millis(100);

/// A rank's endpoint, which its executor and its stages share. One thread of the rank uses it at a time: its
/// own, or the thread that runs the backward of an overlap, if it has the turn. A module of several tensor
/// ranks that is taken out of its pipeline may use it elsewhere.
#[derive(Clone)]
pub(crate) struct SharedEndpoint(Arc<Mutex<Endpoint>>);

impl SharedEndpoint {
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        Self(Arc::new(Mutex::new(endpoint)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Endpoint> {
        // No user code runs under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sleeps until a message arrives or a rank fails; the caller checks for a failure next. Returns at once if a
/// message other than the wanted one was taken since the last wait. The halves of an overlap need that: the
/// half that waits may have taken a message of the other half (`turns.rs`).
///
/// # Errors
/// When no rank of the world has made progress for the whole deadline.
pub(super) fn wait_for_message(
    endpoint: &mut Endpoint,
    board: &ProgressBoard,
    deadline: Duration,
) -> Result<(), Cause> {
    wait(endpoint, board, deadline, Endpoint::wait)
}

/// Like [`wait_for_message`], in the middle of an action: a failure of a later batch, which overlaps with the action's, ends no
/// wait.
pub(super) fn wait_in_attempt(
    endpoint: &mut Endpoint,
    board: &ProgressBoard,
    deadline: Duration,
) -> Result<(), Cause> {
    wait(endpoint, board, deadline, Endpoint::wait_in_attempt)
}

fn wait(
    endpoint: &mut Endpoint,
    board: &ProgressBoard,
    deadline: Duration,
    wait_until: fn(&mut Endpoint, Instant) -> Waited,
) -> Result<(), Cause> {
    let patience = deadline + endpoint.detection_lag(deadline);
    // Reading the progress of all ranks takes longer the more ranks there are, and most waits are short.
    match wait_until(endpoint, Instant::now() + patience.min(SHORT_WAIT)) {
        Waited::Arrived | Waited::Aborted => return Ok(()),
        Waited::TimedOut => {}
    }
    let (mut moves, mut since) = (board.moves(), Instant::now());
    loop {
        match wait_until(endpoint, Instant::now() + patience.min(LOOK)) {
            Waited::Arrived | Waited::Aborted => return Ok(()),
            Waited::TimedOut if board.moves() != moves => (moves, since) = (board.moves(), Instant::now()),
            Waited::TimedOut if since.elapsed() < patience => {}
            Waited::TimedOut => return Err(Cause::Deadline { waited: deadline, report: board.report() }),
        }
    }
}
