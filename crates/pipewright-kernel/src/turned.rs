//! Copies of transposed operands of matrix products in single precision.
//!
//! For `g wᵀ`, the `gemm` crate packs `w` from 64 of its rows at a time. If the rows begin a multiple of 1 KiB
//! apart, their lines fall into a sixteenth of the sets of a first-level cache and displace each other, so that
//! each line is read several times. A copy with the columns in rows reads each line once. On a virtual AMD EPYC
//! (Zen 4), products of 256 rows with 512 rows of 512 numbers run at 106 instead of 80 GFLOP/s, and those of 64
//! rows at 88 instead of 42. With other distances the copy gains nothing.

use std::mem::MaybeUninit;
use std::slice;

use crate::scratch::Scratch;

/// Distances between rows, in elements, whose lines displace each other.
const CONFLICT: usize = 1024 / size_of::<f32>();

/// With fewer rows on the left, the copy takes longer than what it saves.
const LEAST_ROWS: usize = 64;

/// With fewer rows or columns, all lines stay in the cache.
const LEAST_SIDE: usize = 128;

/// With a larger inner dimension, the copy of [`GROUP`] columns would leave a second-level cache. The width of
/// a model is below it, and the vocabulary is not.
const MOST_INNER: usize = 4096;

/// The columns of the product, which are rows of the transposed operand, that are copied at a time. Packing the
/// left operand again for each group takes a small share of the product.
pub(super) const GROUP: usize = 128;

/// Rows and columns that are copied at a time: the lines of so many rows fit into the sets that they share.
const TILE: [usize; 2] = [8, 16];

/// Returns whether a product with `rows` rows on the left is faster with a copy of its right operand, of
/// `inner` rows and `columns` columns, which is the transpose of rows that begin `stride` elements apart.
pub(super) fn is_faster(rows: usize, inner: usize, columns: usize, stride: usize) -> bool {
    stride.is_multiple_of(CONFLICT)
        && rows >= LEAST_ROWS
        && inner.min(columns) >= LEAST_SIDE
        && inner <= MOST_INNER
        // The `gemm` crate adds in another order for one column, so the last group must not be one.
        && columns % GROUP != 1
}

/// Returns the transpose of `rows` rows of `columns` elements, which begin `stride` elements apart, in
/// row-major order in `scratch`. It must have room for all elements.
pub(super) fn turn<'a>(
    scratch: &'a mut Scratch,
    from: &[f32],
    [rows, columns]: [usize; 2],
    stride: usize,
) -> &'a [f32] {
    let len = rows * columns;
    let start: *mut MaybeUninit<f32> = scratch.room(len).cast();
    // SAFETY: the scratch has this many words, which are borrowed with it and need no value.
    let into = unsafe { slice::from_raw_parts_mut(start, len) };
    for row in (0..rows).step_by(TILE[0]) {
        for column in (0..columns).step_by(TILE[1]) {
            let size = [TILE[0].min(rows - row), TILE[1].min(columns - column)];
            turn_tile(&mut into[column * rows + row..], rows, &from[row * stride + column..], stride, size);
        }
    }
    // SAFETY: the tiles cover all elements.
    unsafe { slice::from_raw_parts(start.cast(), len) }
}

/// Writes the transpose of a tile. `into` and `from` begin with its first element.
#[inline(always)]
fn turn_tile(
    into: &mut [MaybeUninit<f32>],
    into_stride: usize,
    from: &[f32],
    from_stride: usize,
    size: [usize; 2],
) {
    // With constant sizes, the loops need no comparison for each element.
    if size == TILE {
        let row = |row: usize| -> &[f32; TILE[1]] { from[row * from_stride..].first_chunk().expect("a row") };
        let tile: [&[f32; TILE[1]]; TILE[0]] = std::array::from_fn(row);
        for column in 0..TILE[1] {
            let into: &mut [MaybeUninit<f32>; TILE[0]] =
                into[column * into_stride..].first_chunk_mut().expect("a column");
            for (into, row) in into.iter_mut().zip(tile) {
                into.write(row[column]);
            }
        }
        return;
    }
    for row in 0..size[0] {
        for column in 0..size[1] {
            into[column * into_stride + row].write(from[row * from_stride + column]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_transposes() {
        for [rows, columns, stride] in
            [[8, 16, 16], [16, 48, 50], [9, 17, 20], [1, 40, 40], [23, 5, 6], [0, 3, 3]]
        {
            let from: Vec<f32> = (0..rows * stride).map(|index| index as f32).collect();
            let mut scratch = Scratch::new(rows * columns);
            let turned = turn(&mut scratch, &from, [rows, columns], stride);
            let expected =
                (0..columns).flat_map(|column| (0..rows).map(move |row| (row * stride + column) as f32));
            assert_eq!(turned, expected.collect::<Vec<_>>(), "{rows} {columns} {stride}");
        }
    }

    #[test]
    fn rows_that_do_not_displace_each_other_are_not_copied() {
        assert!(is_faster(64, 512, 512, 512) && is_faster(256, 1024, 151_936, 1024));
        assert!(!is_faster(256, 1376, 512, 1376), "lines of all sets");
        assert!(!is_faster(1, 512, 512, 512), "a row reads each element once");
        assert!(!is_faster(256, 64, 512, 256) && !is_faster(256, 512, 64, 512), "a head of attention");
        assert!(!is_faster(256, 32_000, 1024, 1024), "a copy of 16 MB");
    }
}
