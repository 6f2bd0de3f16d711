//! A whole product: packs the operands and computes all tiles.

use half::bf16;
use rayon::prelude::*;

use super::pack::Vectors;
use super::tile::{COLUMNS, Output, ROWS, Tile};
use crate::product::{Matrix, is_parallel};

/// Bytes of the right operand that are packed at once: they stay in a second-level cache while they meet all
/// rows of the left operand.
const GROUP_BYTES: usize = 256 * 1024;

/// Proves that the processor has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Instructions(());

impl Instructions {
    pub(super) fn detect() -> Option<Self> {
        #[cfg(feature = "testing")]
        if super::testing::is_hidden() {
            return None;
        }
        let are_available = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16");
        are_available.then_some(Self(()))
    }
}

/// The result of a product.
#[derive(Clone, Copy)]
pub(super) struct Target {
    /// The first element.
    pub(super) output: Output,
    /// The distance between two rows.
    pub(super) row_stride: usize,
}

/// A product whose left operand is packed.
struct Work<'a> {
    left: Vec<u32>,
    rows: usize,
    right: Vectors<'a>,
    pairs: usize,
    target: Target,
}

// SAFETY: threads share the operands for reading, and write different columns of the target.
unsafe impl Sync for Work<'_> {}

/// Computes `a b`.
///
/// # Safety
/// The target must have `a.rows` rows of `b.columns` elements that nothing else uses; if they are added to,
/// they must be initialised.
pub(super) unsafe fn multiply(_: Instructions, a: Matrix<'_, bf16>, b: Matrix<'_, bf16>, target: Target) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product agree");
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    let (rows, right) = (Vectors::rows_of(a), Vectors::columns_of(b));
    let pairs = right.pairs();
    // SAFETY: the processor has the instructions.
    let left = unsafe { pack_left(rows) };
    let panels = right.count.div_ceil(COLUMNS);
    let in_cache = (GROUP_BYTES / size_of::<u32>() / COLUMNS / pairs.max(1)).max(1);
    let work = Work { left, rows: rows.count, right, pairs, target };
    // SAFETY: the processor has the instructions, and each group is computed once.
    let compute = |group: usize, size: usize| unsafe {
        work.columns(group * size, size.min(panels - group * size));
    };
    if is_parallel(a.rows, b.columns, a.columns) {
        // Several groups for each thread, so that threads that are interrupted do less.
        let size = in_cache.min(panels.div_ceil(4 * rayon::current_num_threads()));
        (0..panels.div_ceil(size)).into_par_iter().for_each(|group| compute(group, size));
    } else {
        (0..panels.div_ceil(in_cache)).for_each(|group| compute(group, in_cache));
    }
}

/// Packs all rows of the left operand, in panels of [`ROWS`]; the last one may have fewer.
///
/// # Safety
/// The processor must have the instructions.
unsafe fn pack_left(rows: Vectors<'_>) -> Vec<u32> {
    let (count, pairs) = (rows.count, rows.pairs());
    let mut words = Vec::<u32>::with_capacity(count * pairs);
    for first in (0..count).step_by(ROWS) {
        // SAFETY: panels before this one have a word for each pair of the rows before `first`.
        unsafe {
            let into = words.as_mut_ptr().add(first * pairs);
            rows.pack(first, ROWS.min(count - first), into);
        }
    }
    // SAFETY: each word of each row was written.
    unsafe { words.set_len(count * pairs) };
    words
}

impl Work<'_> {
    /// Computes the columns of some panels of the right operand.
    ///
    /// # Safety
    /// The processor must have the instructions, and the target the columns of the panels.
    unsafe fn columns(&self, first: usize, panels: usize) {
        let (pairs, panel_words) = (self.pairs, self.pairs * COLUMNS);
        let mut words = Vec::<u32>::with_capacity(panels * panel_words);
        for panel in 0..panels {
            // SAFETY: the memory has a panel at this index.
            unsafe {
                let into = words.as_mut_ptr().add(panel * panel_words);
                self.right.pack((first + panel) * COLUMNS, COLUMNS, into);
            }
        }
        for row in (0..self.rows).step_by(ROWS) {
            for panel in 0..panels {
                let column = (first + panel) * COLUMNS;
                // SAFETY: both operands are packed, and the target has the rows and columns of the tile, which
                // this thread alone uses.
                unsafe {
                    let tile = Tile {
                        pairs,
                        left: self.left.as_ptr().add(row * pairs),
                        right: words.as_ptr().add(panel * panel_words),
                        output: self.target.output.at(row * self.target.row_stride + column),
                        stride: self.target.row_stride,
                        rows: ROWS.min(self.rows - row),
                        columns: COLUMNS.min(self.right.count - column),
                    };
                    tile.compute();
                }
            }
        }
    }
}
