//! The locks that the mailbox is made of, in one place, so that a test can put others there.

pub(super) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
pub(super) use std::thread::yield_now;

/// How often a rank offers its core to others before it parks.
pub(super) const YIELDS: u32 = 32;
