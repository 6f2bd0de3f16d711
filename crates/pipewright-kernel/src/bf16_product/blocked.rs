//! A whole product: packs the operands and computes all tiles.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::pack::Vectors;
use super::tile::{COLUMNS, Output, ROWS, Tile, Update};
use crate::product::{Matrix, is_parallel};
use crate::scratch::Scratch;

/// Bytes of the right operand that are packed at once: they stay in a second-level cache while they meet all
/// rows of the left operand.
const GROUP_BYTES: usize = 256 * 1024;

/// Panels of rows whose products take about ten times as long as packing the columns.
const LEAST_ROWS: usize = 8;

/// Proves that the processor has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Instructions(());

impl Instructions {
    pub(super) fn detect() -> Option<Self> {
        #[cfg(feature = "testing")]
        if crate::testing::is_hidden() {
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
    /// A product that is added to the whole result.
    pub(super) update: Option<Update>,
}

/// A product and memory for its packed left operand.
struct Work<'a> {
    /// The first of as many words as the left operand's vectors have pairs.
    left: *mut u32,
    rows: Vectors<'a>,
    right: Vectors<'a>,
    target: Target,
}

// SAFETY: threads share the operands for reading, and write different panels of the packed operand and
// different tiles of the target.
unsafe impl Sync for Work<'_> {}

/// Computes `a b`.
///
/// # Safety
/// The target must have `a.rows` rows of `b.columns` elements that nothing else uses; if they are added to,
/// they must be initialised. The operands of its update must have as many rows and columns.
pub(super) unsafe fn multiply(_: Instructions, a: Matrix<'_, bf16>, b: Matrix<'_, bf16>, target: Target) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product agree");
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    let (rows, right) = (Vectors::rows_of(a), Vectors::columns_of(b));
    let mut left = Scratch::new(rows.count * rows.pairs());
    let work = Work { left: left.as_mut_ptr(), rows, right, target };
    let panels = rows.count.div_ceil(ROWS);
    // SAFETY: the processor has the instructions, and each panel is packed once.
    let pack = |panel| unsafe { work.pack_left(panel) };
    // SAFETY: the processor has the instructions, the left operand is packed, and each block is computed
    // once.
    let compute = |block, next| unsafe { work.compute(block, next) };
    if is_parallel(a.rows, b.columns, a.columns) {
        (0..panels).into_par_iter().for_each(pack);
        let blocks: Vec<_> = work.blocks(rayon::current_num_threads()).collect();
        // Another thread may compute the next block.
        blocks.into_par_iter().for_each(|block| compute(block, 0..0));
    } else {
        (0..panels).for_each(pack);
        let mut blocks = work.blocks(1).peekable();
        while let Some(block) = blocks.next() {
            compute(block, blocks.peek().map_or(0..0, |next| next.columns.clone()));
        }
    }
}

/// A part of the result, in panels of the operands.
struct Block {
    rows: Range<usize>,
    columns: Range<usize>,
}

impl Work<'_> {
    /// Returns the blocks of the result. A thread packs the columns of a block for this block alone.
    fn blocks(&self, threads: usize) -> impl Iterator<Item = Block> {
        let in_cache = (GROUP_BYTES / size_of::<u32>() / COLUMNS / self.right.pairs().max(1)).max(1);
        // Several blocks for each thread, so that threads that are interrupted compute fewer.
        let wanted = if threads == 1 { 1 } else { 4 * threads };
        let [row_panels, panels] = [self.rows.count.div_ceil(ROWS), self.right.count.div_ceil(COLUMNS)];
        let columns = in_cache.min(panels.div_ceil(wanted));
        let groups = panels.div_ceil(columns);
        // Each part of the rows packs the columns again. So rows are cut into short parts only if a thread would
        // have no block otherwise.
        let parts = wanted.div_ceil(groups).min(row_panels / LEAST_ROWS).max(threads.div_ceil(groups));
        let rows = row_panels.div_ceil(parts);
        let ranges =
            |count: usize, size: usize| (0..count).step_by(size).map(move |i| i..count.min(i + size));
        ranges(panels, columns).flat_map(move |columns| {
            ranges(row_panels, rows).map(move |rows| Block { rows, columns: columns.clone() })
        })
    }

    /// Packs [`ROWS`] rows of the left operand; the last panel may have fewer.
    ///
    /// # Safety
    /// The processor must have the instructions, and no other thread may use the panel.
    unsafe fn pack_left(&self, panel: usize) {
        let first = panel * ROWS;
        // SAFETY: panels before this one have a word for each pair of the rows before `first`.
        unsafe {
            let into = self.left.add(first * self.rows.pairs());
            self.rows.pack(first, ROWS.min(self.rows.count - first), into);
        }
    }

    /// Computes a block. Columns `next` of the right operand are packed after it. Reading them takes longer than
    /// packing them, so the cache gets them during the computation.
    ///
    /// # Safety
    /// The processor must have the instructions, the left operand must be packed, and the target must have
    /// the block's elements, which no other thread may use.
    unsafe fn compute(&self, Block { rows, columns }: Block, next: Range<usize>) {
        let pairs = self.rows.pairs();
        let mut words = Scratch::new(columns.len() * COLUMNS * pairs);
        let words = words.as_mut_ptr();
        for (index, panel) in columns.clone().enumerate() {
            // SAFETY: the memory has a panel at this index.
            unsafe { self.right.pack(panel * COLUMNS, COLUMNS, words.add(index * COLUMNS * pairs)) };
        }
        let tiles = rows.len() * columns.len();
        for (part, row) in rows.map(|panel| panel * ROWS).enumerate() {
            for (index, column) in columns.clone().map(|panel| panel * COLUMNS).enumerate() {
                let tile = part * columns.len() + index;
                self.right.prefetch(next.start * COLUMNS, next.len() * COLUMNS, tile, tiles);
                // SAFETY: both operands are packed, and the target has the rows and columns of the tile, which
                // this thread alone uses.
                unsafe {
                    let tile = Tile {
                        pairs,
                        left: self.left.add(row * pairs),
                        right: words.add(index * COLUMNS * pairs),
                        output: self.target.output.at(row * self.target.row_stride + column),
                        stride: self.target.row_stride,
                        rows: ROWS.min(self.rows.count - row),
                        columns: COLUMNS.min(self.right.count - column),
                        update: self.target.update.map(|update| update.at(row, column)),
                    };
                    tile.compute();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of blocks of rows and of columns.
    fn blocks([m, n, k]: [usize; 3], threads: usize) -> [usize; 2] {
        let (a, b) = (vec![bf16::ONE; m * k], vec![bf16::ONE; k * n]);
        let (rows, right) =
            (Vectors::rows_of(Matrix::new(&a, m, k)), Vectors::columns_of(Matrix::new(&b, k, n)));
        let target = Target { output: Output::Single(std::ptr::null_mut()), row_stride: n, update: None };
        let work = Work { left: std::ptr::null_mut(), rows, right, target };
        let mut counts = vec![0; m.div_ceil(ROWS) * n.div_ceil(COLUMNS)];
        let (mut of_rows, mut of_columns) = (0, 0);
        for Block { rows, columns } in work.blocks(threads) {
            of_rows += usize::from(columns.start == 0);
            of_columns += usize::from(rows.start == 0);
            rows.for_each(|row| columns.clone().for_each(|i| counts[row * n.div_ceil(COLUMNS) + i] += 1));
        }
        assert!(counts.iter().all(|&count| count == 1), "each tile is in one block");
        [of_rows, of_columns]
    }

    #[test]
    fn each_thread_has_a_block() {
        assert_eq!(blocks([100, 320, 8], 1), [1, 1]);
        // A group of columns is 256 KiB: 4 panels of 1,024 elements.
        assert_eq!(blocks([100, 320, 1024], 1), [1, 3]);
        assert_eq!(blocks([100, 320, 8], 2), [1, 5]);
        assert_eq!(blocks([100, 320, 8], 3), [1, 10]);
        // Two panels of columns for six threads.
        assert_eq!(blocks([100, 64, 8], 6), [3, 2]);
        assert_eq!(blocks([10, 20, 8], 6), [1, 1]);
    }

    #[test]
    fn each_thread_has_several_blocks_of_many_rows() {
        // As many groups of columns as threads, and one more.
        assert_eq!(blocks([1000, 512, 8], 16), [4, 16]);
        assert_eq!(blocks([1000, 544, 8], 16), [4, 17]);
        // Half of 200 rows is less than 8 panels.
        assert_eq!(blocks([200, 544, 8], 16), [1, 17]);
        assert_eq!(blocks([250, 544, 8], 16), [2, 17]);
        assert_eq!(blocks([1000, 20, 8], 2), [8, 1]);
    }
}
