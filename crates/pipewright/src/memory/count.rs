//! The count of a rank's bytes, and the count of each thread.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

use pipewright_schedule::Action;

use crate::ids::{StepNumber, WorldRank};

/// The current position of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPosition {
    /// The rank.
    pub rank: WorldRank,
    /// The step, counted from 1; 0 before the first.
    pub step: StepNumber,
    /// The current action; `None` outside the rank's program.
    pub action: Option<Action>,
}

type Locate = Box<dyn Fn() -> RankPosition + Send + Sync>;

#[derive(Default)]
pub(super) struct Count {
    held: AtomicI64,
    peak: AtomicI64,
    locate: OnceLock<Locate>,
}

impl std::fmt::Debug for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Count").field("held", &self.held).field("peak", &self.peak).finish_non_exhaustive()
    }
}

impl Count {
    pub(super) fn add(&self, bytes: i64) {
        let held = self.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if held > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(held, Ordering::Relaxed);
        }
    }

    pub(super) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed).max(0).unsigned_abs()
    }

    /// Returns the highest count since [`Count::restart_peak`].
    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed).max(0).unsigned_abs()
    }

    /// Resets the peak to the current count.
    pub(super) fn restart_peak(&self) {
        self.peak.store(self.held.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Sets the function that returns the rank's position.
    pub(super) fn locate_by(&self, locate: impl Fn() -> RankPosition + Send + Sync + 'static) {
        let _ = self.locate.set(Box::new(locate));
    }

    pub(super) fn place(&self) -> Option<RankPosition> {
        self.locate.get().map(|locate| locate())
    }
}

thread_local! {
    /// The count of this thread's rank; null on threads of no rank. It is plain data without a destructor, so
    /// the allocator may read it at any moment of a thread's life.
    static COUNT: Cell<*const Count> = const { Cell::new(ptr::null()) };
}

/// Returns the count of this thread's rank.
pub(super) fn of_this_thread() -> Option<Arc<Count>> {
    let count = COUNT.get();
    if count.is_null() {
        return None;
    }
    // SAFETY: the pointer points into a living `Arc`, which the guard of `count_this_thread` keeps. The guard
    // resets the pointer when it is dropped, and cannot outlive the thread's use of the pointer.
    Some(unsafe {
        Arc::increment_strong_count(count);
        Arc::from_raw(count)
    })
}

/// Counts the calling thread's allocations for a rank until it is dropped.
pub(crate) struct Counted {
    /// Keeps the count alive while the thread points at it.
    _count: Arc<Count>,
}

impl Counted {
    pub(super) fn new(count: Arc<Count>) -> Self {
        COUNT.set(Arc::as_ptr(&count));
        Self { _count: count }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        COUNT.set(ptr::null());
    }
}
