//! One rank's count of bytes, and the rank that each thread allocates for.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

use pipewright_schedule::Action;

use super::blocks;
use crate::ids::{StepNumber, WorldRank};
use crate::tensor::Value;

/// One rank's count. All clones add to the same count.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankMemory {
    count: Arc<Count>,
}

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
    fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed).max(0).unsigned_abs()
    }

    /// Resets the peak to the current count.
    fn restart_peak(&self) {
        self.peak.store(self.held.load(Ordering::Relaxed), Ordering::Relaxed);
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

/// Returns the bytes that the rank of this thread holds, and the most that it held since [`restart_peak`];
/// `None` on a thread of no rank, and if blocks are not counted.
pub(crate) fn held_and_peak() -> Option<(u64, u64)> {
    let count = of_this_thread().filter(|_| blocks::is_in_use())?;
    Some((count.held(), count.peak()))
}

/// Resets the peak of this thread's rank to its current count.
pub(crate) fn restart_peak() {
    if let Some(count) = of_this_thread() {
        count.restart_peak();
    }
}

/// Counts the calling thread's allocations for a rank until it is dropped.
pub(crate) struct Counted {
    /// Keeps the count alive while the thread points at it.
    _count: Arc<Count>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        COUNT.set(ptr::null());
    }
}

impl RankMemory {
    /// Makes an empty count.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Counts the calling thread's allocations until the guard is dropped.
    pub(crate) fn count_this_thread(&self) -> Counted {
        COUNT.set(Arc::as_ptr(&self.count));
        Counted { _count: self.count.clone() }
    }

    /// Sets the function that returns the rank's position when memory runs out. It must not allocate.
    pub(crate) fn locate_by(&self, locate: impl Fn() -> RankPosition + Send + Sync + 'static) {
        let _ = self.count.locate.set(Box::new(locate));
    }

    /// Removes storage that moves to another thread from this rank's count, unless this rank still uses it.
    pub(crate) fn give_away<'a>(&self, tensors: impl IntoIterator<Item = &'a Value>) {
        if blocks::is_in_use() {
            let moved = tensors.into_iter().filter_map(Value::storage).filter(|storage| !storage.is_shared);
            moved.for_each(|storage| blocks::give_away(storage.address));
        }
    }

    /// Like [`RankMemory::give_away`], but for all elements of a list.
    pub(crate) fn give_away_list<T>(&self, list: &[T]) {
        blocks::give_away(list.as_ptr().addr());
    }

    /// Adds storage that came from another thread to this rank's count, unless it is on another rank's.
    pub(crate) fn take_over<'a>(&self, tensors: impl IntoIterator<Item = &'a Value>) {
        if blocks::is_in_use() {
            let arrived = tensors.into_iter().filter_map(Value::storage);
            arrived.for_each(|storage| blocks::take_over(storage.address, &self.count));
        }
    }

    /// Resets the peak to the current count.
    pub(crate) fn restart_peak(&self) {
        self.count.restart_peak();
    }

    /// Returns the highest count since [`RankMemory::restart_peak`]; 0 if blocks are not counted.
    pub(crate) fn peak(&self) -> u64 {
        self.count.peak()
    }
}
