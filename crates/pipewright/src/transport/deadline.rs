//! The ends of waits.

use std::time::{Duration, Instant};

/// The longest wait: ten years. A longer one could not be added to an instant on every system.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Returns the end of a wait that starts at the current time.
pub(crate) fn end_of_wait(wait: Duration) -> Instant {
    Instant::now() + wait.min(LONGEST_WAIT)
}
