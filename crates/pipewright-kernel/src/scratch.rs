//! Memory for packed operands of products. Each thread keeps it for its next product, because first touches of new memory
//! take longer than packing.

use std::cell::RefCell;
use std::mem::MaybeUninit;

/// The most bytes of a packed operand that a thread keeps for its next product, so that threads without products hold little.
pub const KEPT_BYTES: usize = 8 * 1024 * 1024;
const KEPT_LINES: usize = KEPT_BYTES / size_of::<Line>();

/// Smaller memory is not made, so that threads hold the same for products of different sizes, and what a rank holds does not
/// depend on its layers. Pages that are not touched take no memory.
const LEAST_LINES: usize = 128 * 1024 / size_of::<Line>();

/// A thread packs a left and a right operand at the same time at most. While it waits for other threads, it may
/// compute parts of another product, which needs memory of its own.
const KEPT: usize = 2;

/// A cache line, so that loads of a register's size do not cross lines.
#[repr(C, align(64))]
struct Line([MaybeUninit<u32>; 16]);

thread_local! {
    static FREE: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// Uninitialised words, which begin at a cache line.
pub(crate) struct Scratch {
    /// Has no elements: the words are in its capacity.
    lines: Vec<Line>,
}

impl Scratch {
    /// Returns memory for `words` words: the thread's latest if it is large enough.
    pub(crate) fn new(words: usize) -> Self {
        let mut lines = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
        let count = words.div_ceil(16).max(LEAST_LINES);
        if lines.capacity() < count {
            // The old memory is freed before more is allocated.
            drop(lines);
            lines = Vec::with_capacity(count);
        }
        Self { lines }
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u32 {
        self.lines.as_mut_ptr().cast()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        if lines.capacity() > KEPT_LINES {
            return;
        }
        FREE.with_borrow_mut(|free| {
            if free.len() < KEPT {
                free.push(lines);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `check` on a thread that has no memory yet.
    fn on_new_thread(check: fn()) {
        std::thread::spawn(check).join().expect("no assertion fails");
    }

    #[test]
    fn memory_is_kept_for_the_next_operands() {
        on_new_thread(|| {
            let [mut left, mut right] = [100, 40].map(Scratch::new);
            let kept = [left.as_mut_ptr(), right.as_mut_ptr()];
            assert!(kept.iter().all(|at| at.addr().is_multiple_of(64)) && kept[0] != kept[1]);
            drop(right);
            drop(left);
            let [mut left, mut right] = [90, 48].map(Scratch::new);
            assert_eq!([left.as_mut_ptr(), right.as_mut_ptr()], kept);
            drop((right, left));
            assert!(Scratch::new(113).lines.capacity() >= 8);
        });
    }

    #[test]
    fn large_memory_and_memory_of_nested_products_is_freed() {
        on_new_thread(|| {
            drop(Scratch::new(16 * KEPT_LINES + 1));
            FREE.with_borrow(|free| assert_eq!(free.len(), 0));
            drop([1, 2, 3].map(Scratch::new));
            FREE.with_borrow(|free| assert_eq!(free.len(), KEPT));
        });
    }
}
