//! The locks of the mailbox, in one place so that a test can replace them.

pub(super) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
pub(super) use std::thread::yield_now;

/// How often a rank yields its core before it parks.
pub(super) const YIELDS: u32 = 32;
