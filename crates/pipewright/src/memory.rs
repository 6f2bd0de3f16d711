//! How many bytes each rank of a process holds, measured at the allocator.
//!
//! A program that installs [`TrackingAllocator`] gets every allocation counted for the rank whose thread makes it. A
//! tensor that moves to another rank is taken off the sender's count and put on the receiver's, so that each count is
//! what that rank holds. Without the allocator all counts are zero.
//!
//! ```
//! use pipewright::memory::TrackingAllocator;
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator<std::alloc::System> = TrackingAllocator(std::alloc::System);
//! # fn main() {}
//! ```

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::tensor::Value;

/// An allocator that counts for the rank of the calling thread, and leaves the allocating to another.
pub struct TrackingAllocator<A>(pub A);

/// One rank's count. Clones count together.
#[derive(Clone, Debug)]
pub(crate) struct RankMemory {
    count: Arc<Count>,
    /// Whether the program's allocator counts at all. Without it a transfer must not be counted either.
    tracked: bool,
}

#[derive(Debug, Default)]
struct Count {
    held: AtomicI64,
    peak: AtomicI64,
}

impl Count {
    fn add(&self, bytes: i64) {
        let held = self.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if held > self.peak.load(Ordering::Relaxed) {
            self.peak.store(held, Ordering::Relaxed);
        }
    }
}

thread_local! {
    /// The count of this thread's rank; null on threads of no rank. Plain data without a destructor, so that the
    /// allocator may read it at any moment of a thread's life.
    static COUNT: Cell<*const Count> = const { Cell::new(ptr::null()) };
}

/// Keeps the calling thread's allocations counted for a rank.
pub(crate) struct Counted {
    /// Keeps the count alive as long as the thread points at it.
    _count: Arc<Count>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        COUNT.set(ptr::null());
    }
}

impl RankMemory {
    /// A count of nothing.
    pub(crate) fn new() -> Self {
        let mut memory = Self { count: Arc::default(), tracked: false };
        // An allocation of our own shows whether anybody counts.
        let counted = memory.count_this_thread();
        drop(std::hint::black_box(Box::new(0u64)));
        drop(counted);
        memory.tracked = memory.peak() > 0;
        memory
    }

    /// Counts what the calling thread allocates, until the guard is dropped.
    pub(crate) fn count_this_thread(&self) -> Counted {
        COUNT.set(Arc::as_ptr(&self.count));
        Counted { _count: self.count.clone() }
    }

    /// Takes storage that leaves for another thread off this rank's count.
    pub(crate) fn give_away(&self, bytes: usize) {
        self.transfer(-(bytes as i64));
    }

    /// Puts storage that came from another thread on this rank's count.
    pub(crate) fn take_over(&self, bytes: usize) {
        self.transfer(bytes as i64);
    }

    fn transfer(&self, bytes: i64) {
        if self.tracked {
            self.count.add(bytes);
        }
    }

    /// Forgets the peak so far.
    pub(crate) fn restart_peak(&self) {
        self.count.peak.store(self.count.held.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Most bytes held at once since [`RankMemory::restart_peak`]; 0 when nobody counts.
    pub(crate) fn peak(&self) -> u64 {
        self.count.peak.load(Ordering::Relaxed).max(0).unsigned_abs()
    }
}

/// Bytes of a list of tensors.
pub(crate) fn bytes_of<'a>(tensors: impl IntoIterator<Item = &'a Value>) -> usize {
    tensors.into_iter().map(Value::bytes).sum()
}

fn count(bytes: i64) {
    let count = COUNT.get();
    if !count.is_null() {
        // SAFETY: the pointer is set from a living `Arc` by `count_this_thread`, whose guard keeps that `Arc` and
        // resets the pointer when it is dropped; the guard cannot outlive its thread's use of it.
        unsafe { &*count }.add(bytes);
    }
}

// SAFETY: every call is passed on unchanged; counting neither allocates nor touches the memory.
unsafe impl<A: GlobalAlloc> GlobalAlloc for TrackingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's contract is the inner allocator's.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above; `pointer` came from the same inner allocator.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as above.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as i64 - layout.size() as i64);
        // SAFETY: as above.
        unsafe { self.0.realloc(pointer, layout, new_size) }
    }
}
