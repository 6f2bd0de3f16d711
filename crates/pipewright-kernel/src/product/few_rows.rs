//! Products of few rows with a right operand whose rows are neighbours, as in generation. The operand is larger than
//! the caches and each element is used a few times, so it is read once, in long runs, and not packed.

use rayon::prelude::*;

use super::blocked::{self, Target};
use super::definition::BLOCK;
use super::kernel::Kernel;
use super::matrix::{Matrix, is_parallel};
use super::pack::{Panel, Vectors};
use super::tile::{Join, Order, Tile};
use super::vector::prefetch;
use crate::scratch::Scratch;

/// With more rows, packing takes a small share of the time.
const MOST_ROWS: usize = 16;

/// Rows of the right operand that are read at once, with up to four rows on the left and with more.
const DEPTHS: [usize; 2] = [8, 16];

/// Sums that stay in a first-level cache.
const SUMS: usize = 8192;

/// The most and the fewest columns of a strip. Runs are as long.
const STRIP: [usize; 2] = [4096, 512];

/// How many columns ahead of the products the processor requests.
const AHEAD: usize = 256;

/// Returns whether a product is faster this way.
pub(super) fn is_faster(kernel: Kernel, order: Order, target: Target, a: Matrix<'_>, b: Matrix<'_>) -> bool {
    let has_order = match order {
        Order::Blocks => true,
        // Rows of the right operand are read as they are, so pairs are whole and nothing becomes zero.
        Order::Pairs => b.column_stride == 1 && a.columns.is_multiple_of(2),
        Order::FlushedPairs => false,
    };
    has_order
        && target.join != Join::Continue
        && (1..=MOST_ROWS).contains(&a.rows)
        && a.columns >= 16
        && b.columns >= 128
        && (b.column_stride == 1 || a.rows <= kernel.size()[0])
}

/// Pointers that threads share.
struct Shared {
    order: Order,
    left: *const f32,
    target: Target,
}

// SAFETY: threads share the left operand for reading, and write different columns of the target.
unsafe impl Sync for Shared {}

/// Computes `a b`.
///
/// # Safety
/// As for [`multiply`](super::blocked::multiply).
pub(super) unsafe fn multiply(kernel: Kernel, order: Order, target: Target, a: Matrix<'_>, b: Matrix<'_>) {
    let [most_rows, width] = kernel.size();
    let (inner, height) = (a.columns, a.rows.div_ceil(a.rows.div_ceil(most_rows)));
    let mut left = Scratch::new(a.rows * inner);
    let left: *mut f32 = left.as_mut_ptr().cast();
    for row in (0..a.rows).step_by(height) {
        let width = height.min(a.rows - row);
        let panel = Panel { first: row, width, start: 0, depth: inner, is_flushed: false };
        // SAFETY: panels before this one have all elements of the rows before it.
        unsafe { kernel.pack(Vectors::rows_of(a), panel, left.add(row * inner)) };
    }
    let whole = b.columns - b.columns % width;
    let shared = &Shared { order, left, target };
    each_strip([a.rows, whole, inner], width, |columns| {
        // SAFETY: the left operand is packed, and each strip is computed once.
        unsafe {
            if b.column_stride == 1 {
                shared.compute_strip(kernel, height, columns, a, b);
            } else {
                shared.compute_turned(kernel, columns, a, b);
            }
        };
    });
    if whole < b.columns {
        let rest = Matrix { data: &b.data[whole * b.column_stride..], columns: b.columns - whole, ..b };
        let target = Target { start: target.start.wrapping_add(whole), ..target };
        // SAFETY: as the caller says, for the columns after the whole panels.
        unsafe {
            blocked::multiply(kernel, order, target, a, rest);
        };
    }
}

/// Calls `compute` once for each strip of the columns of a product, with its first column and the number of its columns. Strips
/// begin at multiples of `width`. Several threads compute the strips of a large product.
pub(crate) fn each_strip(
    [rows, columns, inner]: [usize; 3],
    width: usize,
    compute: impl Fn([usize; 2]) + Sync,
) {
    let is_parallel = is_parallel(rows, columns, inner);
    let threads = if is_parallel { rayon::current_num_threads() } else { 1 };
    let strip = (SUMS / rows).clamp(STRIP[1], STRIP[0]).min(columns.div_ceil(threads));
    let strip = strip.next_multiple_of(width);
    let strips = columns.div_ceil(strip);
    let compute = |index: usize| compute([index * strip, strip.min(columns - index * strip)]);
    if is_parallel {
        (0..strips).into_par_iter().for_each(compute);
    } else {
        (0..strips).for_each(compute);
    }
}

impl Shared {
    /// Computes `count` columns, which are whole panels, from `first` on.
    ///
    /// # Safety
    /// As [`multiply`]; the left operand must be packed in panels of `height` rows, and no other thread may use the columns.
    unsafe fn compute_strip(
        &self,
        kernel: Kernel,
        height: usize,
        [first, count]: [usize; 2],
        a: Matrix<'_>,
        b: Matrix<'_>,
    ) {
        let ([_, width], depth) = (kernel.size(), DEPTHS[usize::from(a.rows > 4)]);
        let mut sums = Scratch::new(a.rows * count);
        let sums: *mut f32 = sums.as_mut_ptr().cast();
        let block = if self.order == Order::Blocks { BLOCK } else { a.columns };
        for start in (0..a.columns).step_by(block) {
            let end = a.columns.min(start + block);
            for k in (start..end).step_by(depth) {
                for column in (0..count).step_by(width) {
                    // After the last column of a strip, the next rows are read.
                    let ahead = column + AHEAD.min(count);
                    let (next, ahead) = if ahead < count { (k, ahead) } else { (k + depth, ahead - count) };
                    for i in next..next + depth {
                        let next = i * b.row_stride + first + ahead;
                        for line in (0..width).step_by(64 / size_of::<f32>()) {
                            prefetch(b.data.as_ptr().wrapping_add(next + line));
                        }
                    }
                    for row in (0..a.rows).step_by(height) {
                        let rows = height.min(a.rows - row);
                        // SAFETY: the operands have these elements, and the sums have these rows and columns.
                        unsafe {
                            let tile = Tile {
                                inner: depth.min(end - k),
                                left: self.left.add(row * a.columns + k * rows),
                                right: b.data.as_ptr().add(k * b.row_stride + first + column),
                                right_stride: b.row_stride,
                                out: sums.add(row * count + column),
                                stride: count,
                                rows,
                                columns: width,
                                join: if k == start { Join::Replace } else { Join::Continue },
                                requests: None,
                            };
                            kernel.compute(self.order, &tile);
                        }
                    }
                }
            }
            let is_replaced = start == 0 && self.target.join == Join::Replace;
            for row in 0..a.rows {
                for column in 0..count {
                    // SAFETY: the tiles wrote all sums, and the target has these columns.
                    unsafe {
                        let at = self.target.start.add(row * self.target.row_stride + first + column);
                        let sum = *sums.add(row * count + column);
                        at.write(if is_replaced { sum } else { *at + sum });
                    }
                }
            }
        }
    }

    /// Like [`Shared::compute_strip`], for columns whose elements are neighbours.
    ///
    /// # Safety
    /// As [`Shared::compute_strip`], with one panel of rows.
    unsafe fn compute_turned(
        &self,
        kernel: Kernel,
        [first, count]: [usize; 2],
        a: Matrix<'_>,
        b: Matrix<'_>,
    ) {
        let [_, width] = kernel.size();
        for column in (first..first + count).step_by(width) {
            for start in (0..a.columns).step_by(BLOCK) {
                let joined = if start == 0 { self.target.join } else { Join::Add };
                // SAFETY: the operands have these elements, and the target has these rows and columns.
                unsafe {
                    let tile = Tile {
                        inner: BLOCK.min(a.columns - start),
                        left: self.left.add(start * a.rows),
                        right: b.data.as_ptr().add(column * b.column_stride + start),
                        right_stride: b.column_stride,
                        out: self.target.start.add(column),
                        stride: self.target.row_stride,
                        rows: a.rows,
                        columns: width,
                        join: joined,
                        requests: None,
                    };
                    kernel.compute_turned(&tile);
                }
            }
        }
    }
}
