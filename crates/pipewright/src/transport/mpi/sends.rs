//! The messages of this process whose buffers MPI still uses.
//!
//! The rank's thread adds a message when it passes the buffer to the MPI thread, which removes it when the
//! transfer is complete. Both sides use one lock: a rank that finds a message in flight is marked as waiting
//! under that lock, so the MPI thread cannot complete the transfer without seeing the mark.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ids::{Attempt, WorldRank};
use crate::message::Tag;

/// A message of this process: its receiver, its attempt and its tag.
pub(super) type SentMessage = (WorldRank, Attempt, Tag);

/// The messages in flight.
#[derive(Default)]
pub(super) struct Sends(Mutex<State>);

#[derive(Default)]
struct State {
    in_flight: HashSet<SentMessage>,
    /// The messages in flight that sends of the program made.
    boundaries: u32,
    /// The largest number of them since the count began.
    peak: u32,
    /// Whether the rank waits until a message is sent.
    is_awaited: bool,
}

impl Sends {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the peak from now on.
    pub(super) fn restart_peak(&self) {
        let mut state = self.lock();
        state.peak = state.boundaries;
    }

    /// Adds a message whose buffer is about to be sent.
    pub(super) fn start(&self, message: SentMessage) {
        let mut state = self.lock();
        if state.in_flight.insert(message) && is_boundary(message.2) {
            state.boundaries += 1;
            state.peak = state.peak.max(state.boundaries);
        }
    }

    /// Removes a message whose buffer is free. Returns whether the rank must be woken, because it waits for a
    /// message to be sent.
    pub(super) fn complete(&self, message: &SentMessage) -> bool {
        let mut state = self.lock();
        if state.in_flight.remove(message) && is_boundary(message.2) {
            state.boundaries -= 1;
        }
        std::mem::take(&mut state.is_awaited)
    }

    /// Returns whether the message's buffer is free. If not, the rank is woken when the next transfer
    /// completes.
    pub(super) fn is_sent(&self, message: &SentMessage) -> bool {
        let mut state = self.lock();
        let is_sent = !state.in_flight.contains(message);
        state.is_awaited = !is_sent;
        is_sent
    }

    /// Returns the largest number of messages of the program that were in flight at once since the count began.
    pub(super) fn peak(&self) -> u32 {
        self.lock().peak
    }
}

/// Returns whether a message has the tensors of a boundary.
pub(super) fn is_boundary(tag: Tag) -> bool {
    matches!(tag, Tag::Boundary { .. })
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::{Microbatch, StageIndex};

    use super::*;
    use crate::message::Direction;

    fn message(microbatch: u32) -> SentMessage {
        let (stage, microbatch) = (StageIndex::new(1), Microbatch::new(microbatch));
        let tag = Tag::Boundary { direction: Direction::Forward, stage, microbatch };
        (WorldRank::new(1), Attempt::new(1), tag)
    }

    #[test]
    fn a_rank_is_woken_only_if_it_waits_for_a_send() {
        let sends = Sends::default();
        sends.start(message(0));
        sends.start(message(1));
        assert!(!sends.complete(&message(0)), "nobody waits");
        assert!(sends.is_sent(&message(0)) && !sends.is_sent(&message(1)));
        assert!(sends.complete(&message(1)));
        assert!(sends.is_sent(&message(1)));
    }

    #[test]
    fn the_peak_counts_messages_of_the_program() {
        let sends = Sends::default();
        let (to, attempt, _) = message(0);
        sends.start((to, attempt, Tag::Squares));
        (0..3).for_each(|microbatch| sends.start(message(microbatch)));
        sends.complete(&message(0));
        sends.start(message(3));
        assert_eq!(sends.peak(), 3);
        for microbatch in [1, 2] {
            sends.complete(&message(microbatch));
        }
        sends.restart_peak();
        assert_eq!(sends.peak(), 1);
    }
}
