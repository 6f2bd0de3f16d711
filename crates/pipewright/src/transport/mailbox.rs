//! A queue of messages for one rank, which can sleep until a message arrives.
//!
//! The mailbox does not depend on the type of messages. Its locks come from `super::sync`: the standard library's here, and
//! those of a model checker in `tests/mailbox.rs`, which compiles this file a second time and runs it under thousands of
//! thread interleavings.
//!
//! # Why no wake-up is lost
//!
//! A rank checks the queue and the reason to stop and goes to sleep under one lock. A sender pushes its message under the
//! same lock and signals afterwards, so it cannot signal between the check and the sleep. A reason to stop is not part of
//! the queue; [`Mailbox::wake`] takes the lock only to be ordered in the same way.

use std::time::Instant;

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError, YIELDS, yield_now};

/// Messages for one rank.
pub(crate) struct Mailbox<M> {
    queue: Mutex<Vec<M>>,
    arrival: Condvar,
}

/// How a wait at a mailbox ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    /// There are messages.
    Arrived,
    /// The deadline passed.
    TimedOut,
    /// There is a reason to stop.
    Stopped,
}

impl<M> Default for Mailbox<M> {
    fn default() -> Self {
        Self { queue: Mutex::new(Vec::new()), arrival: Condvar::new() }
    }
}

impl<M> Mailbox<M> {
    fn lock(&self) -> MutexGuard<'_, Vec<M>> {
        // A panic cannot leave the queue half changed: no foreign code runs under the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message and wakes the rank.
    pub(crate) fn deliver(&self, message: M) {
        self.lock().push(message);
        self.signal();
    }

    /// Swaps the messages with `empty`.
    pub(crate) fn take_into(&self, empty: &mut Vec<M>) {
        std::mem::swap(empty, &mut self.lock());
    }

    /// Wakes the rank because there is a reason to stop.
    pub(crate) fn wake(&self) {
        drop(self.lock());
        self.signal();
    }

    /// Wakes the rank. A rank that has checked the queue but is not yet asleep would miss the signal, so callers take the
    /// lock before they signal.
    pub(crate) fn signal(&self) {
        self.arrival.notify_all();
    }

    /// Sleeps until there are messages, `until` passes, or `must_stop` returns true. `must_stop` is called under the lock.
    pub(crate) fn wait(&self, until: Instant, must_stop: impl Fn() -> bool) -> Woken {
        // A neighbour that is nearly done answers within microseconds; waking a parked thread takes longer.
        for _ in 0..YIELDS {
            if let Some(woken) = self.look(&self.lock(), &must_stop) {
                return woken;
            }
            yield_now();
        }
        let mut queue = self.lock();
        loop {
            if let Some(woken) = self.look(&queue, &must_stop) {
                return woken;
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else { return Woken::TimedOut };
            queue = self.arrival.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn look(&self, queue: &[M], must_stop: impl Fn() -> bool) -> Option<Woken> {
        match (must_stop(), queue.is_empty()) {
            (true, _) => Some(Woken::Stopped),
            (false, false) => Some(Woken::Arrived),
            (false, true) => None,
        }
    }
}
