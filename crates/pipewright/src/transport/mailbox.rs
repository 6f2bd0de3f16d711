//! Where messages for one rank wait until it takes them, and the bell that wakes it.
//!
//! Nothing in here knows what a message is. The locks come from `super::sync`: the standard library's here, those of a
//! model checker in `tests/mailbox.rs`, which compiles this file a second time and runs it under thousands of orders of
//! its threads.
//!
//! # Why no wake-up is lost
//!
//! A rank looks at the queue and at the reason to stop, and goes to sleep, under one lock; so whoever changes either and
//! then rings must have held that lock in between. A message is pushed under it. A reason to stop is no part of the
//! queue: [`Mailbox::wake`] takes the lock for nothing else than to stand in that order.

use std::time::Instant;

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError, YIELDS, yield_now};

/// Messages for one rank.
pub(crate) struct Mailbox<M> {
    queue: Mutex<Vec<M>>,
    bell: Condvar,
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
        Self { queue: Mutex::new(Vec::new()), bell: Condvar::new() }
    }
}

impl<M> Mailbox<M> {
    fn lock(&self) -> MutexGuard<'_, Vec<M>> {
        // A panic cannot leave the queue half changed: nothing under the lock runs foreign code.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a message in and rings.
    pub(crate) fn deliver(&self, message: M) {
        self.lock().push(message);
        self.ring();
    }

    /// Exchanges what is in the mailbox for `empty`.
    pub(crate) fn take_into(&self, empty: &mut Vec<M>) {
        std::mem::swap(empty, &mut self.lock());
    }

    /// Wakes the rank after a reason to stop has come up.
    pub(crate) fn wake(&self) {
        drop(self.lock());
        self.ring();
    }

    /// Rings, which nobody hears who has looked and not yet gone to sleep.
    pub(crate) fn ring(&self) {
        self.bell.notify_all();
    }

    /// Sleeps until there are messages, `until` passes, or `must_stop` says so; it is called under the lock.
    pub(crate) fn wait(&self, until: Instant, must_stop: impl Fn() -> bool) -> Woken {
        // A neighbour that is nearly done answers within microseconds, and waking a parked thread takes longer.
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
            queue = self.bell.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
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
