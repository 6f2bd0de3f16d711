//! A number for which the threads of a test wait.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Count {
    value: Mutex<u64>,
    changed: Condvar,
}

impl Count {
    pub(crate) fn set(&self, value: u64) {
        *self.value.lock().expect("no panic") = value;
        self.changed.notify_all();
    }

    /// Adds 1, and returns the sum.
    pub(crate) fn add_one(&self) -> u64 {
        let mut value = self.value.lock().expect("no panic");
        *value += 1;
        self.changed.notify_all();
        *value
    }

    /// Waits until the number is at least `least`. The test fails if this takes a minute.
    pub(crate) fn wait_for(&self, least: u64) {
        let value = self.value.lock().expect("no panic");
        let waited = self.changed.wait_timeout_while(value, Duration::from_secs(60), |value| *value < least);
        // The lock is released before the panic, so other threads can still count.
        let has_timed_out = waited.expect("no panic").1.timed_out();
        assert!(!has_timed_out, "{least} is not reached");
    }
}
