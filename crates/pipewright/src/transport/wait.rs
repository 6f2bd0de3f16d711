//! The result of a wait, and the end of a wait with a deadline.

use std::time::{Duration, Instant};

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// A message arrived, or one that this rank waits for has left
    /// ([`Endpoint::is_sent`](super::Endpoint::is_sent)).
    Arrived,
    /// The deadline passed.
    TimedOut,
    /// A rank failed.
    Aborted,
}

/// The longest wait: ten years. A longer one could not be added to an instant on every system.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Returns the end of a wait that starts at the current time.
pub(crate) fn end_of_wait(wait: Duration) -> Instant {
    Instant::now() + wait.min(LONGEST_WAIT)
}
