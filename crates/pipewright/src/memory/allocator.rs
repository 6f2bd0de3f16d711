//! The allocator that counts large blocks.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr;

use super::blocks::{self, Block};
use super::count::of_this_thread;
use super::exhaustion;

/// An allocator that counts large blocks for the rank of the calling thread. The inner allocator does the
/// allocation.
pub struct TrackingAllocator<A>(pub A);

/// Records a block that the inner allocator has returned.
fn note(pointer: *mut u8, bytes: usize) -> *mut u8 {
    if pointer.is_null() {
        exhaustion::report(bytes);
    } else if blocks::counts(bytes) {
        blocks::add(pointer.addr(), Block { bytes, owner: of_this_thread() });
    }
    pointer
}

// SAFETY: every call is passed on unchanged, or fails if the process has reached its limit. Counting neither
// accesses the memory nor unwinds, and its own allocations are not counted.
unsafe impl<A: GlobalAlloc> GlobalAlloc for TrackingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !blocks::may_grow(0, layout.size()) {
            return note(ptr::null_mut(), layout.size());
        }
        // SAFETY: the caller's contract is the inner allocator's.
        note(unsafe { self.0.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !blocks::may_grow(0, layout.size()) {
            return note(ptr::null_mut(), layout.size());
        }
        // SAFETY: as above.
        note(unsafe { self.0.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // The block is removed first: afterwards another thread may get the same address.
        if blocks::counts(layout.size()) {
            blocks::remove(pointer.addr());
        }
        // SAFETY: as above; `pointer` came from the same inner allocator.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !blocks::may_grow(layout.size(), new_size) {
            return note(ptr::null_mut(), new_size);
        }
        let earlier = blocks::counts(layout.size()).then(|| blocks::remove(pointer.addr())).flatten();
        // SAFETY: as above.
        let moved = unsafe { self.0.realloc(pointer, layout, new_size) };
        match earlier {
            Some(block) if moved.is_null() => {
                // The block is where it was.
                blocks::add(pointer.addr(), block);
                note(moved, new_size)
            }
            // The block stays on its count, whichever thread makes it grow.
            Some(Block { owner, .. }) => {
                if blocks::counts(new_size) {
                    blocks::add(moved.addr(), Block { bytes: new_size, owner });
                }
                moved
            }
            None => note(moved, new_size),
        }
    }
}
