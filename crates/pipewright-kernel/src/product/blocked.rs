//! A whole product: packs the operands and computes all tiles.

use std::ops::Range;

use rayon::prelude::*;

use super::blocks::{Block, blocks, panels_in_cache};
use super::definition::BLOCK;
use super::kernel::Kernel;
use super::matrix::{Matrix, is_parallel};
use super::pack::{Panel, Vectors};
use super::request::LineRequests;
use super::tile::{Join, Order, Tile};
use crate::scratch::Scratch;

/// Bytes of the left operand that are packed at once. They stay in a third-level cache.
const LEFT_BYTES: usize = 2 * 1024 * 1024;

/// The result of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// The first element.
    pub(crate) start: *mut f32,
    /// The distance between two rows.
    pub(crate) row_stride: usize,
    pub(crate) join: Join,
}

/// The products of some rows with a part of the inner dimension.
struct Work<'a> {
    kernel: Kernel,
    order: Order,
    rows: Vectors<'a>,
    columns: Vectors<'a>,
    /// The first of the rows, and their number.
    first: usize,
    count: usize,
    /// Rows of a panel of the left operand.
    height: usize,
    /// The first element of the inner dimension.
    start: usize,
    /// Elements of the packed operands.
    depth: usize,
    /// The packed left operand.
    left: *mut f32,
    target: Target,
}

// SAFETY: threads share the operands for reading, and write different panels of the packed operand and
// different tiles of the target.
unsafe impl Sync for Work<'_> {}

/// Computes `a b`.
///
/// # Safety
/// The processor must have the instructions of the kernel. The target must have `a.rows` rows of `b.columns` elements that
/// nothing else uses, initialised unless they are replaced. Pairs are added only in one block. `b` must have the inner dimension
/// of `a`.
pub(super) unsafe fn multiply(kernel: Kernel, order: Order, target: Target, a: Matrix<'_>, b: Matrix<'_>) {
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    let [most_rows, _] = kernel.size();
    let height = a.rows.div_ceil(a.rows.div_ceil(most_rows));
    let longest = a.columns.min(BLOCK).next_multiple_of(2);
    let chunk = (LEFT_BYTES / size_of::<f32>() / longest.max(1) / height).max(1) * height;
    let mut left = Scratch::new(chunk.min(a.rows.next_multiple_of(height)) * longest);
    let left = left.as_mut_ptr().cast();
    let is_parallel = is_parallel(a.rows, b.columns, a.columns);
    for first in (0..a.rows).step_by(chunk) {
        // Without an inner dimension, one part without elements gives the result its zeros.
        for start in (0..a.columns.max(1)).step_by(BLOCK) {
            let join = match order {
                _ if start == 0 => target.join,
                Order::Blocks if target.join != Join::Continue => Join::Add,
                _ => Join::Continue,
            };
            let depth = BLOCK.min(a.columns - start);
            let work = Work {
                kernel,
                order,
                rows: Vectors::rows_of(a),
                columns: Vectors::columns_of(b),
                first,
                count: chunk.min(a.rows - first),
                height,
                start,
                depth: if order == Order::Blocks { depth } else { depth.next_multiple_of(2) },
                left,
                target: Target { join, ..target },
            };
            // SAFETY: as the caller says; the memory has the packed rows.
            unsafe { work.run(is_parallel) };
        }
    }
}

impl Work<'_> {
    /// # Safety
    /// As [`multiply`]; `left` must have an element for each of the packed rows.
    unsafe fn run(&self, is_parallel: bool) {
        let [_, width] = self.kernel.size();
        let panels = self.count.div_ceil(self.height);
        let blocks = |threads| {
            blocks(
                [panels, self.columns.count.div_ceil(width)],
                panels_in_cache(self.depth * width * size_of::<f32>()),
                threads,
            )
        };
        // SAFETY: each panel is packed once, and each block is computed once, after that.
        let (pack, compute) =
            (|panel| unsafe { self.pack_left(panel) }, |block, next| unsafe { self.compute(block, next) });
        if is_parallel {
            (0..panels).into_par_iter().for_each(pack);
            let blocks: Vec<_> = blocks(rayon::current_num_threads()).collect();
            // Another thread may compute the next block.
            blocks.into_par_iter().for_each(|block| compute(block, self.right_panel(0..0)));
        } else {
            let mut blocks = blocks(1).peekable();
            (0..panels).for_each(pack);
            while let Some(block) = blocks.next() {
                let next = match blocks.peek() {
                    Some(next) => self.right_panel(next.columns.clone()),
                    // The next part of the inner dimension begins with the first columns.
                    None => {
                        Panel { start: self.start + self.depth, ..self.right_panel(0..block.columns.len()) }
                    }
                };
                compute(block, next);
            }
        }
    }

    fn panel(&self, first: usize, width: usize) -> Panel {
        Panel {
            first,
            width,
            start: self.start,
            depth: self.depth,
            is_flushed: self.order == Order::FlushedPairs,
        }
    }

    /// Packs a panel of the left operand; the last may have fewer rows.
    ///
    /// # Safety
    /// As [`Work::run`]; no other thread may use the panel.
    unsafe fn pack_left(&self, panel: usize) {
        let row = panel * self.height;
        let rows = self.height.min(self.count - row);
        // SAFETY: panels before this one have all elements of the rows before it.
        unsafe {
            self.kernel.pack(self.rows, self.panel(self.first + row, rows), self.left.add(row * self.depth));
        };
    }

    /// Returns some panels of columns as one.
    fn right_panel(&self, columns: Range<usize>) -> Panel {
        let [_, width] = self.kernel.size();
        self.panel(columns.start * width, columns.len() * width)
    }

    /// Computes a block. The panel `next` of the right operand is packed after it. Reading it takes longer than packing it.
    ///
    /// # Safety
    /// As [`Work::run`]; the left operand must be packed, and no other thread may use the block's elements.
    unsafe fn compute(&self, Block { rows, columns }: Block, next: Panel) {
        let [_, width] = self.kernel.size();
        let mut room = Scratch::new(columns.len() * width * self.depth);
        let right: *mut f32 = room.as_mut_ptr().cast();
        for (index, panel) in columns.clone().enumerate() {
            // SAFETY: the memory has a panel at this index.
            unsafe {
                let into = right.add(index * width * self.depth);
                self.kernel.pack(self.columns, self.panel(panel * width, width), into);
            }
        }
        let steps = if self.order == Order::Blocks { self.depth } else { self.depth / 2 };
        let count = rows.len() * columns.len();
        let out = |row: usize, column: usize| {
            let offset = (self.first + row * self.height).wrapping_mul(self.target.row_stride);
            self.target.start.wrapping_add(offset).wrapping_add(column * width)
        };
        for (part, row) in rows.enumerate() {
            for (index, column) in columns.clone().enumerate() {
                let next_out =
                    if column + 1 < columns.end { out(row, column + 1) } else { out(row + 1, columns.start) };
                let requests = [
                    self.columns.request(next, [part * columns.len() + index, count], steps),
                    LineRequests::new(next_out, [self.height, width, self.target.row_stride], [0, 1], steps),
                ];
                let first = row * self.height;
                // SAFETY: both operands are packed, and the target has the rows and columns of the tile,
                // which only this thread uses.
                unsafe {
                    let tile = Tile {
                        inner: self.depth,
                        left: self.left.add(first * self.depth),
                        right: right.add(index * width * self.depth),
                        right_stride: width,
                        out: out(row, column),
                        stride: self.target.row_stride,
                        rows: self.height.min(self.count - first),
                        columns: width.min(self.columns.count - column * width),
                        join: self.target.join,
                        requests: Some(requests),
                    };
                    self.kernel.compute(self.order, &tile);
                }
            }
        }
    }
}
