//! Matrices in slices, and their sizes.

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

    /// Returns the same matrix of other elements, in a slice of the same length.
    pub(crate) fn with_data<U>(self, data: &[U]) -> Matrix<'_, U> {
        assert_eq!(data.len(), self.data.len(), "each element has another in its place");
        let Self { rows, columns, row_stride, column_stride, .. } = self;
        Matrix { data, rows, columns, row_stride, column_stride }
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
