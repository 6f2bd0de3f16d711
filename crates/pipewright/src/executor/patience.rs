//! How long a rank waits for a message: until no rank of the world has made progress for the whole deadline.

use std::time::{Duration, Instant};

use crate::progress::ProgressBoard;
use crate::transport::{Endpoint, Waited};

/// How long a rank waits before it checks whether other ranks make progress.
const SHORT_WAIT: Duration = Duration::from_millis(10);

/// Sleeps until a message arrives or a rank fails. Returns false if no rank has made progress for the whole deadline.
pub(super) fn wait_for_message(endpoint: &mut Endpoint, board: &ProgressBoard, deadline: Duration) -> bool {
    let patience = deadline + endpoint.detection_lag(deadline);
    // Reading the progress of all ranks takes longer the more ranks there are, and most waits are short.
    match endpoint.wait(Instant::now() + patience.min(SHORT_WAIT)) {
        Waited::Arrived | Waited::Aborted => return true,
        Waited::TimedOut => {}
    }
    loop {
        let moves = board.moves();
        match endpoint.wait(Instant::now() + patience) {
            // The caller checks for an abort next.
            Waited::Arrived | Waited::Aborted => return true,
            Waited::TimedOut if board.moves() != moves => {}
            Waited::TimedOut => return false,
        }
    }
}
