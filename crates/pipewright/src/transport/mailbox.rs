//! A queue of messages for one rank, which can sleep until a message arrives or another event wakes it.
//!
//! The mailbox does not depend on the type of messages. Its locks come from `super::sync`: the standard
//! library's here, and a model checker's in `tests/mailbox.rs`, which compiles this file a second time and
//! runs it under thousands of thread interleavings.
//!
//! # Why no wake-up is lost
//!
//! A rank checks the queue and the reason to stop and goes to sleep under one lock. A sender pushes its
//! message under the same lock and signals afterwards, so it cannot signal between the check and the sleep. A
//! nudge, which says that a sent message has left, is set under the lock in the same way and stays set until
//! a wait returns because of it. A reason to stop is not part of the queue; [`Mailbox::wake`] takes the lock
//! only to be ordered in the same way.

use std::time::Instant;

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError, YIELDS, yield_now};

/// Messages for one rank.
pub(crate) struct Mailbox<M> {
    queue: Mutex<Queue<M>>,
    arrival: Condvar,
}

struct Queue<M> {
    messages: Vec<M>,
    /// Whether the next wait returns at once.
    is_nudged: bool,
}

/// How a wait at a mailbox ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    /// There are messages, or the rank was nudged.
    Arrived,
    /// The deadline passed.
    TimedOut,
    /// There is a reason to stop.
    Stopped,
}

impl<M> Default for Mailbox<M> {
    fn default() -> Self {
        let queue = Queue { messages: Vec::new(), is_nudged: false };
        Self { queue: Mutex::new(queue), arrival: Condvar::new() }
    }
}

impl<M> Mailbox<M> {
    fn lock(&self) -> MutexGuard<'_, Queue<M>> {
        // A panic cannot leave the queue half changed: no foreign code runs under the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message and wakes the rank.
    pub(crate) fn deliver(&self, message: M) {
        self.lock().messages.push(message);
        self.signal();
    }

    /// Swaps the messages with `empty`.
    pub(crate) fn take_into(&self, empty: &mut Vec<M>) {
        std::mem::swap(empty, &mut self.lock().messages);
    }

    /// Wakes the rank without a message, or makes its next wait return at once.
    pub(crate) fn nudge(&self) {
        self.lock().is_nudged = true;
        self.signal();
    }

    /// Wakes the rank because there is a reason to stop.
    pub(crate) fn wake(&self) {
        drop(self.lock());
        self.signal();
    }

    /// Wakes the rank. A rank that has checked the queue but is not yet asleep would miss the signal, so
    /// callers take the lock before they signal.
    pub(crate) fn signal(&self) {
        self.arrival.notify_all();
    }

    /// Sleeps until there are messages, the rank is nudged, `until` passes, or `must_stop` returns true.
    /// `must_stop` is called under the lock.
    pub(crate) fn wait(&self, until: Instant, must_stop: impl Fn() -> bool) -> Woken {
        // A neighbour that is nearly done answers within microseconds; waking a parked thread takes longer.
        for _ in 0..YIELDS {
            if let Some(woken) = look(&mut self.lock(), &must_stop) {
                return woken;
            }
            yield_now();
        }
        let mut queue = self.lock();
        loop {
            if let Some(woken) = look(&mut queue, &must_stop) {
                return woken;
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else { return Woken::TimedOut };
            queue = self.arrival.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn look<M>(queue: &mut Queue<M>, must_stop: impl Fn() -> bool) -> Option<Woken> {
    if must_stop() {
        return Some(Woken::Stopped);
    }
    let is_nudged = std::mem::take(&mut queue.is_nudged);
    (is_nudged || !queue.messages.is_empty()).then_some(Woken::Arrived)
}
