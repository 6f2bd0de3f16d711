//! A whole product: packs the operands and computes all tiles.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::amx::Tiles;
use super::available::Available;
use super::instruction::Instruction;
use super::pack::Vectors;
use super::right::{PackedRight, Right};
use super::tile::{COLUMNS, Output, Tile, Update};
use crate::product::{Block, LineRequests, Matrix, blocks, is_parallel, panels_in_cache};
use crate::scratch::{KEPT_BYTES, Scratch};

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
    instruction: Instruction,
    /// The first of as many words as the packed rows of the left operand have pairs.
    left: *mut u32,
    rows: Vectors<'a>,
    right: PackedRight<'a>,
    target: Target,
}

// SAFETY: threads share the operands for reading, and write different panels of the packed operand and
// different tiles of the target.
unsafe impl Sync for Work<'_> {}

/// Computes `a b`.
///
/// # Safety
/// The target must have `a.rows` rows of as many elements as `b` has columns that nothing else uses; if they are added to,
/// they must be initialised. The operands of its update must have as many rows and columns.
pub(super) unsafe fn multiply(available: Available, a: Matrix<'_, bf16>, b: Right<'_>, target: Target) {
    assert_eq!(a.columns, b.inner(), "inner dimensions of a product agree");
    let columns = b.columns();
    // A sum of zero would change the sign of a negative zero.
    let adds_nothing = a.columns == 0 && matches!(target.output, Output::Added(_));
    if a.rows == 0 || columns == 0 || adds_nothing {
        return;
    }
    let instruction = available.begin();
    let at_once = instruction.pairs_at_once();
    let (rows, right) = (Vectors::rows_of(a, at_once), b.packed(at_once));
    let mut left = Scratch::new(instruction.packed_rows(rows.count) * rows.pairs());
    let work = Work { instruction, left: left.as_mut_ptr(), rows, right, target };
    let panels = rows.count.div_ceil(instruction.panel_rows());
    // SAFETY: the processor has the instructions, and each panel is packed once.
    let pack = |panel| unsafe { work.pack_left(panel) };
    // SAFETY: the processor has the instructions, the left operand is packed, and each block is computed
    // once.
    let compute = |block, next| unsafe { work.compute(block, next) };
    if is_parallel(a.rows, columns, a.columns) {
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

impl Work<'_> {
    /// Returns the blocks of the result.
    fn blocks(&self, threads: usize) -> impl Iterator<Item = Block> {
        let panels =
            [self.rows.count.div_ceil(self.instruction.panel_rows()), self.right.count().div_ceil(COLUMNS)];
        // Blocks that need more memory than a thread keeps would allocate it again each time.
        let kept = KEPT_BYTES / (self.rows.pairs() * COLUMNS * size_of::<u32>()).max(1);
        blocks(panels, self.right.at_once().min(kept).max(self.panels_in_cache()), threads)
    }

    /// Returns the panels of columns that stay in a cache while they meet all rows.
    fn panels_in_cache(&self) -> usize {
        panels_in_cache(self.rows.pairs() * COLUMNS * size_of::<u32>())
    }

    /// Packs a panel of the left operand; the last may have fewer rows.
    ///
    /// # Safety
    /// The processor must have the instructions, and no other thread may use the panel.
    unsafe fn pack_left(&self, panel: usize) {
        let height = self.instruction.panel_rows();
        let first = panel * height;
        let count = height.min(self.rows.count - first);
        // SAFETY: panels before this one have a word for each pair of the rows before `first`.
        unsafe {
            let into = self.left.add(first * self.rows.pairs());
            match self.instruction {
                Instruction::Avx512Bf16 => self.rows.pack(first, count, into),
                Instruction::Amx => self.rows.pack_tiles(first, count, into),
            }
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
        // SAFETY: the memory has a panel for each of the columns.
        unsafe { self.right.pack(columns.clone(), COLUMNS, pairs, words) };
        let count = rows.len() * columns.len();
        let height = self.instruction.panel_rows();
        // SAFETY: the process may use the instructions, and the thread computes one block at a time.
        let tiles = (self.instruction == Instruction::Amx).then(|| unsafe { Tiles::configure() });
        let near = self.panels_in_cache();
        let parts = columns
            .clone()
            .step_by(near)
            .flat_map(|first| rows.clone().map(move |row| (first, row * height)));
        // A tile of AMX has no steps.
        let steps = if tiles.is_some() { 0 } else { pairs };
        let none = LineRequests::of_one_line(self.left);
        let mut tile = 0;
        for (first, row) in parts {
            let end = columns.end.min(first + near);
            for column in first..end {
                let vectors = [next.start * COLUMNS, next.len() * COLUMNS];
                let of_right = self.right.request(vectors, [tile, count], steps);
                let next_tile = if column + 1 < end { [row, column + 1] } else { [row + height, first] };
                let stride = self.target.row_stride;
                let output =
                    self.target.output.at(next_tile[0].wrapping_mul(stride)).at(next_tile[1] * COLUMNS);
                let of_output = (steps > 0).then(|| output.request([height, COLUMNS, stride], steps));
                tile += 1;
                let (index, column) = (column - columns.start, column * COLUMNS);
                // SAFETY: both operands are packed, and the target has the rows and columns of the tile,
                // which only this thread uses.
                unsafe {
                    let tile = Tile {
                        pairs,
                        left: self.left.add(row * pairs),
                        right: words.add(index * COLUMNS * pairs),
                        output: self.target.output.at(row * stride + column),
                        stride,
                        rows: height.min(self.rows.count - row),
                        columns: COLUMNS.min(self.right.count() - column),
                        update: self.target.update.map(|update| update.at(row, column)),
                        requests: [of_right, of_output].map(|request| request.unwrap_or(none)),
                    };
                    match &tiles {
                        None => tile.compute(),
                        Some(tiles) => tile.compute_with(tiles),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantised::{BlockKind, Blocks, Form, QuantisedMatrix, QuantisedOperand};

    /// Returns the number of blocks of rows and of columns.
    fn blocks(instruction: Instruction, [m, n, k]: [usize; 3], threads: usize) -> [usize; 2] {
        blocks_of(instruction, m, Right::Held(Matrix::new(&vec![bf16::ONE; k * n], k, n)), threads)
    }

    /// Like [`blocks`], of `m` rows and a right operand.
    fn blocks_of(instruction: Instruction, m: usize, right: Right<'_>, threads: usize) -> [usize; 2] {
        let (k, n) = (right.inner(), right.columns());
        let a = vec![bf16::ONE; m * k];
        let rows = Vectors::rows_of(Matrix::new(&a, m, k), instruction.pairs_at_once());
        let right = right.packed(instruction.pairs_at_once());
        let target = Target { output: Output::Single(std::ptr::null_mut()), row_stride: n, update: None };
        let work = Work { instruction, left: std::ptr::null_mut(), rows, right, target };
        let mut counts = vec![0; m.div_ceil(instruction.panel_rows()) * n.div_ceil(COLUMNS)];
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
        let blocks = |size, threads| blocks(Instruction::Avx512Bf16, size, threads);
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
        let blocks = |size, threads| blocks(Instruction::Avx512Bf16, size, threads);
        // As many groups of columns as threads, and one more.
        assert_eq!(blocks([1000, 512, 8], 16), [4, 16]);
        assert_eq!(blocks([1000, 544, 8], 16), [4, 17]);
        // Half of 200 rows is less than 8 panels.
        assert_eq!(blocks([200, 544, 8], 16), [1, 17]);
        assert_eq!(blocks([250, 544, 8], 16), [2, 17]);
        assert_eq!(blocks([1000, 20, 8], 2), [8, 1]);
    }

    /// Panels that are decoded together are less than the memory that a thread keeps.
    #[test]
    #[cfg_attr(miri, ignore = "takes minutes under Miri")]
    fn a_thread_keeps_the_memory_of_a_block() {
        for (k, of_columns) in [(4096, 1), (28672, 2), (131072, 8)] {
            let bytes = vec![0; k * BlockKind::Q4K.bytes()];
            let matrix = Blocks::new(BlockKind::Q4K, [k, 256], bytes).expect("a matrix");
            let matrix = QuantisedMatrix::new(k, Form::Blocks(matrix));
            let right = Right::Quantised(QuantisedOperand::plain(&matrix));
            assert_eq!(blocks_of(Instruction::Avx512Bf16, 1, right, 1), [1, of_columns], "{k}");
        }
    }

    /// Panels of rows are higher with AMX, and vectors are filled up to a multiple of 32 elements.
    #[test]
    fn tiles_have_blocks_of_their_own() {
        let blocks = |size, threads| blocks(Instruction::Amx, size, threads);
        assert_eq!(blocks([100, 320, 8], 1), [1, 1]);
        assert_eq!(blocks([100, 320, 1024], 1), [1, 3]);
        assert_eq!(blocks([100, 320, 1025], 1), [1, 4]);
        // Four panels of rows and two of columns for six threads.
        assert_eq!(blocks([100, 64, 8], 6), [2, 2]);
        // Half of 480 rows is less than 8 panels.
        assert_eq!(blocks([480, 544, 8], 16), [1, 17]);
        assert_eq!(blocks([481, 544, 8], 16), [2, 17]);
    }
}
