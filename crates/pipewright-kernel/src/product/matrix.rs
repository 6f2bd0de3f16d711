//! Matrices in slices, and their sizes.

use half::bf16;

use crate::half::{Half, widen_all};
use crate::simd::{fresh, written};

/// Products with fewer multiplications stay on one thread, as in Burn's CPU back end.
pub(crate) const PARALLEL_FROM: usize = 192 * 192 * 192;

/// The use of the sums of a product.
#[derive(Debug)]
pub enum Sums<'a, T> {
    /// They are written.
    Single(&'a mut [f32]),
    /// They are written, rounded to an element type.
    Rounded(&'a mut [T]),
    /// They are added.
    Added(&'a mut [f32]),
}

/// A matrix in a slice, with strides in elements. One of the strides is 1.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T = f32> {
    pub(crate) data: &'a [T],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Returns a matrix of `rows` rows of `columns` elements in row-major order.
    pub fn new(data: &'a [T], rows: usize, columns: usize) -> Self {
        Self::strided(data, rows, columns, columns)
    }

    /// Returns a matrix whose rows begin `row_stride` elements apart. The slice may have more elements.
    pub fn strided(data: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert_fits(data.len(), rows, columns, row_stride);
        // Without the elements behind the matrix, which a conversion of all elements would include.
        let end = if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row_stride + columns };
        Self { data: &data[..end], rows, columns, row_stride, column_stride: 1 }
    }

    /// Swaps rows and columns without moving elements.
    pub fn transposed(self) -> Self {
        let Self { data, rows, columns, row_stride, column_stride } = self;
        Self { data, rows: columns, columns: rows, row_stride: column_stride, column_stride: row_stride }
    }

    /// Returns an element.
    #[cfg(test)]
    pub(crate) fn at(self, row: usize, column: usize) -> T
    where
        T: Copy,
    {
        self.data[row * self.row_stride + column * self.column_stride]
    }

    /// Returns the number of lines, whose elements are neighbours, the elements of a line, and the distance between two lines.
    fn lines(&self) -> [usize; 3] {
        let &Self { rows, columns, row_stride, column_stride, .. } = self;
        if column_stride == 1 { [rows, columns, row_stride] } else { [columns, rows, column_stride] }
    }

    /// Returns a matrix of this size and orientation, whose lines follow each other in `data`.
    pub(crate) fn with_lines<U>(self, data: &[U]) -> Matrix<'_, U> {
        let [count, len, _] = self.lines();
        let lines = Matrix::new(data, count, len);
        if self.column_stride == 1 { lines } else { lines.transposed() }
    }
}

impl Matrix<'_, bf16> {
    /// Returns the elements in single precision, for [`Matrix::with_lines`]. A line may be a small part of the distance to the
    /// next, as in the rows of one head of several.
    pub(crate) fn widened_lines(self) -> Vec<f32> {
        let [count, len, stride] = self.lines();
        // A matrix ends with its last element.
        if self.data.len() == count * len {
            return bf16::widened(self.data);
        }
        let mut widened = fresh(count * len);
        for (widened, line) in widened.chunks_exact_mut(len).zip(self.data.chunks(stride)) {
            widen_all(line, widened);
        }
        // SAFETY: each line but the last has `stride` elements, and the last has `len`, which are at most as many.
        unsafe { written(widened) }
    }
}

/// Returns the number of elements of `a b`. Matrices without elements may have any number of rows, so the number
/// is not bounded by their memory.
///
/// # Panics
/// When the number is too large for a `usize`, or the inner dimensions differ.
pub(crate) fn product_size<T>(a: Matrix<'_, T>, b: Matrix<'_, T>) -> usize {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product agree");
    a.rows.checked_mul(b.columns).expect("a product has at most usize::MAX elements")
}

pub(crate) fn assert_fits(len: usize, rows: usize, columns: usize, row_stride: usize) {
    let end = || (rows - 1).checked_mul(row_stride)?.checked_add(columns);
    let fits = rows == 0
        || columns == 0
        || (columns <= row_stride || rows == 1) && end().is_some_and(|end| end <= len);
    assert!(fits, "{rows} rows of {columns}, {row_stride} apart, do not fit into {len} elements");
}

/// Returns whether a product of `rows x inner` and `inner x columns` elements is computed by several threads.
pub(crate) fn is_parallel(rows: usize, columns: usize, inner: usize) -> bool {
    // With one thread, the query for the pool's size would be wasted.
    rows.saturating_mul(columns).saturating_mul(inner) >= PARALLEL_FROM && rayon::current_num_threads() > 1
}
