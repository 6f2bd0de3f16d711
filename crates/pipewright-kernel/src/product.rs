//! Matrix products with the `gemm` crate, which Burn's CPU back end uses too. The result goes into
//! uninitialised memory, or is added to existing values.

use gemm::Parallelism;

use crate::scratch::Scratch;
use crate::turned::{GROUP, is_faster, turn};

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

    /// Returns the same matrix of other elements, in a slice of the same length.
    pub(crate) fn with_data<U>(self, data: &[U]) -> Matrix<'_, U> {
        assert_eq!(data.len(), self.data.len(), "each element has another in its place");
        let Self { rows, columns, row_stride, column_stride, .. } = self;
        Matrix { data, rows, columns, row_stride, column_stride }
    }
}

/// Returns whether a product of `rows x inner` and `inner x columns` elements is computed by several threads.
pub(crate) fn is_parallel(rows: usize, columns: usize, inner: usize) -> bool {
    // With one thread, the query for the pool's size would be wasted.
    rows.saturating_mul(columns).saturating_mul(inner) >= PARALLEL_FROM && rayon::current_num_threads() > 1
}

/// Computes `a b` into new memory, in row-major order.
pub fn product(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    let size = product_size(a, b);
    let mut out = Vec::with_capacity(size);
    if a.columns == 0 {
        out.resize(size, 0.0);
        return out;
    }
    // SAFETY: `out` has room for `rows x columns` elements in rows of `columns`, and without accumulation
    // gemm writes each of them (its inner dimension is not zero) and reads none.
    unsafe {
        multiply(out.as_mut_ptr(), b.columns, a, b, false);
        out.set_len(size);
    }
    out
}

/// Computes `out = a b`, in rows that begin `row_stride` elements apart.
pub fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
    assert_fits(out.len(), a.rows, b.columns, row_stride);
    // SAFETY: the assertion bounds every element of the result.
    unsafe { multiply(out.as_mut_ptr(), row_stride, a, b, false) };
}

/// Computes `out += a b`, in rows that begin `row_stride` elements apart.
pub fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
    assert_fits(out.len(), a.rows, b.columns, row_stride);
    // SAFETY: the assertion bounds every element of the result.
    unsafe { multiply(out.as_mut_ptr(), row_stride, a, b, true) };
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

/// # Safety
/// `out` must point to `a.rows` rows of `b.columns` elements, `row_stride` apart, that nothing else uses;
/// with `accumulate` they must be initialised.
unsafe fn multiply(out: *mut f32, row_stride: usize, a: Matrix<'_>, b: Matrix<'_>, accumulate: bool) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product agree");
    let is_turned = b.row_stride == 1
        && is_faster(a.rows, b.rows, b.columns, b.column_stride)
        && !is_parallel(a.rows, b.columns, a.columns);
    if !is_turned {
        // SAFETY: the caller says so.
        return unsafe { multiply_in_place(out, row_stride, a, b, accumulate) };
    }
    let mut scratch = Scratch::new(GROUP * b.rows);
    for start in (0..b.columns).step_by(GROUP) {
        let columns = GROUP.min(b.columns - start);
        let group = &b.data[start * b.column_stride..];
        let group = turn(&mut scratch, group, [columns, b.rows], b.column_stride);
        let group = Matrix::new(group, b.rows, columns);
        // SAFETY: these columns are a part of the caller's rows.
        unsafe { multiply_in_place(out.add(start), row_stride, a, group, accumulate) };
    }
}

/// Multiplies operands as they are.
///
/// # Safety
/// As for [`multiply`].
unsafe fn multiply_in_place(
    out: *mut f32,
    row_stride: usize,
    a: Matrix<'_>,
    b: Matrix<'_>,
    accumulate: bool,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    let stride = |stride: usize| stride as isize;
    let parallelism = if is_parallel(m, n, k) { Parallelism::Rayon(0) } else { Parallelism::None };
    // SAFETY: `a` and `b` were bounded when they were made, `out` by the caller.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out,
            1,
            stride(row_stride),
            accumulate,
            a.data.as_ptr(),
            stride(a.column_stride),
            stride(a.row_stride),
            b.data.as_ptr(),
            stride(b.column_stride),
            stride(b.row_stride),
            1f32,
            1f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 11) % 19) as f32 - 9.0).collect()
    }

    #[test]
    #[should_panic = "do not fit"]
    fn a_stride_that_wraps_is_refused() {
        Matrix::strided(&[0.0; 10], 3, 1, 1 << 63);
    }

    fn check(m: usize, n: usize, k: usize) {
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        let expected: Vec<f32> = (0..m * n)
            .map(|index| (0..k).map(|i| a[index / n * k + i] * b[i * n + index % n]).sum())
            .collect();
        let (left, right) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
        assert_eq!(product(left, right), expected, "{m} {n} {k}");

        let turned: Vec<f32> = (0..m * k).map(|index| a[index % m * k + index / m]).collect();
        let left = Matrix::new(&turned, k, m).transposed();
        assert_eq!(product(left, right), expected, "{m} {n} {k} transposed");
        let turned: Vec<f32> = (0..k * n).map(|index| b[index % k.max(1) * n + index / k.max(1)]).collect();
        let turned = Matrix::new(&turned, n, k).transposed();
        assert_eq!(product(left, turned), expected, "{m} {n} {k} with a transposed right operand");

        let stride = n + 3;
        let mut out = vec![1.0; m * stride];
        add_product(&mut out, stride, left, right);
        for (row, expected) in out.chunks(stride).zip(expected.chunks(n.max(1))) {
            assert!(row[..n].iter().zip(expected).all(|(a, b)| *a == b + 1.0));
            assert_eq!(row[n..], [1.0; 3]);
        }
        product_into(&mut out, stride, left, right);
        assert!(
            out.chunks(stride).zip(expected.chunks(n.max(1))).all(|(row, expected)| row[..n] == *expected)
        );
    }

    #[test]
    fn products_equal_their_definition() {
        check(1, 1, 1);
        check(3, 5, 2);
        check(17, 9, 33);
        check(4, 4, 0);
        // With a copy of the transposed right operand, in two groups of columns.
        check(65, 131, 256);
    }

    #[test]
    fn copies_of_transposed_operands_change_no_bit() {
        for columns in [128, 129, 130, 300] {
            let fractions =
                |count: usize| (0..count).map(|index| ((index * 37) % 101) as f32 / 7.0).collect();
            let [a, b]: [Vec<f32>; 2] = [64 * 256, columns * 256].map(fractions);
            let (a, b) = (Matrix::new(&a, 64, 256), Matrix::new(&b, columns, 256).transposed());
            let mut out = vec![0.0; 64 * columns];
            // SAFETY: `out` has 64 rows of `columns` elements.
            unsafe { multiply_in_place(out.as_mut_ptr(), columns, a, b, false) };
            assert_eq!(product(a, b), out, "{columns} columns");
        }
    }

    #[test]
    #[should_panic(expected = "at most usize::MAX elements")]
    fn a_size_that_wraps_is_refused() {
        let (rows, columns) = (1 << (usize::BITS - 1), 2);
        product(Matrix::new(&[], rows, 0), Matrix::new(&[], 0, columns));
    }

    #[test]
    fn a_matrix_ends_with_its_last_element() {
        let lengths = [[2, 3], [1, 9], [0, 3], [3, 0]]
            .map(|[rows, columns]| Matrix::strided(&[0.0; 20], rows, columns, 5).data.len());
        assert_eq!(lengths, [8, 9, 0, 0]);
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn a_matrix_stays_in_its_slice() {
        Matrix::strided(&[0.0; 10], 2, 4, 7);
    }
}
