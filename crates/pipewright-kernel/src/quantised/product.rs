//! Products with a quantised matrix as the right operand.

use half::bf16;
use rayon::prelude::*;

use super::decoded::{Decoded, Rounding};
use super::matrix::QuantisedMatrix;
use crate::bf16_product;
use crate::half::Half;
use crate::narrow_product::{self, AnyMatrix};
use crate::product::{self, Matrix, is_parallel};

/// The bytes of a decoded panel, unless its columns are long.
const PANEL_BYTES: usize = 2 * 1024 * 1024;

/// Panels have at least so many columns of the product, so that packing the left operand again for each takes a
/// small share of the product.
const LEAST_COLUMNS: usize = 32;

/// A quantised matrix as the right operand of a product.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedOperand<'a> {
    matrix: &'a QuantisedMatrix,
    /// Whether the rows of the matrix are the columns of the operand.
    is_transposed: bool,
}

impl<'a> QuantisedOperand<'a> {
    /// Returns `wᵀ` of a matrix `w`: the operand of a linear layer's forward, `x wᵀ`.
    pub fn transposed(matrix: &'a QuantisedMatrix) -> Self {
        Self { matrix, is_transposed: true }
    }

    /// Returns the matrix itself: the operand of a linear layer's backward, `g w`.
    pub fn plain(matrix: &'a QuantisedMatrix) -> Self {
        Self { matrix, is_transposed: false }
    }

    /// Returns the rows of the operand.
    pub fn inner(self) -> usize {
        if self.is_transposed { self.matrix.columns() } else { self.matrix.rows() }
    }

    /// Returns the columns of the operand.
    pub fn columns(self) -> usize {
        if self.is_transposed { self.matrix.rows() } else { self.matrix.columns() }
    }

    /// Returns `width` columns from `first` on, and of them `depth` elements from `start` on, as a matrix of
    /// decoded elements in `room`. Columns after the last one are left out.
    pub(crate) fn panel<'p, T: Decoded>(
        self,
        [first, width]: [usize; 2],
        [start, depth]: [usize; 2],
        room: &'p mut [T],
        is_parallel: bool,
    ) -> Matrix<'p, T> {
        let width = width.min(self.columns() - first);
        let room = &mut room[..width * depth];
        let length = if self.is_transposed { depth } else { width };
        let decode = |(index, row): (usize, &mut [T])| {
            if self.is_transposed {
                self.matrix.decode(first + index, start..start + depth, row);
            } else {
                self.matrix.decode(start + index, first..first + width, row);
            }
        };
        if is_parallel {
            room.par_chunks_exact_mut(length.max(1)).enumerate().for_each(decode);
        } else {
            room.chunks_exact_mut(length.max(1)).enumerate().for_each(decode);
        }
        if self.is_transposed {
            Matrix::new(room, width, depth).transposed()
        } else {
            Matrix::new(room, depth, width)
        }
    }

    /// Returns the number of columns of each panel in single precision but the last one.
    fn panel_columns(self) -> usize {
        let fitting = PANEL_BYTES / size_of::<f32>() / self.inner().max(1);
        let columns = fitting.max(LEAST_COLUMNS).next_multiple_of(LEAST_COLUMNS);
        // The `gemm` crate adds in another order for one column, so the last panel must not be one.
        if self.columns() % columns == 1 { columns + LEAST_COLUMNS } else { columns }
    }
}

/// Computes `a b` into new memory, in row-major order, from elements that are rounded.
pub fn product(a: Matrix<'_>, b: QuantisedOperand<'_>, rounding: Rounding) -> Vec<f32> {
    let (rows, inner, columns) = (a.rows, b.inner(), b.columns());
    assert_eq!(a.columns, inner, "inner dimensions of a product agree");
    let mut out = vec![0.0; rows * columns];
    if rows == 0 || inner == 0 {
        return out;
    }
    let is_parallel = is_parallel(rows, columns, inner);
    let width = b.panel_columns().min(columns);
    let mut room = vec![0.0; width * inner];
    for first in (0..columns).step_by(width.max(1)) {
        let width = width.min(columns - first);
        b.panel([first, width], [0, inner], &mut room, is_parallel);
        rounding.round(&mut room[..width * inner]);
        let panel = if b.is_transposed {
            Matrix::new(&room[..], width, inner).transposed()
        } else {
            Matrix::new(&room[..], inner, width)
        };
        product::product_into(&mut out[first..], columns, a, panel);
    }
    out
}

/// Computes `a b` in bfloat16 into new memory, in row-major order. The elements of `b` are rounded to
/// bfloat16, and each element of the result is rounded once.
pub fn half_product(a: Matrix<'_, bf16>, b: QuantisedOperand<'_>) -> Vec<bf16> {
    if let Some(out) = bf16_product::quantised_product(a, b, None) {
        return out;
    }
    bf16::narrowed(&widened_product(a, b))
}

/// Computes `a b + c d` like [`bf16_product::product_with_update`].
pub fn half_product_with_update(
    a: Matrix<'_, bf16>,
    b: QuantisedOperand<'_>,
    [c, d]: [&[f32]; 2],
    rank: usize,
) -> Vec<bf16> {
    assert_eq!([c.len(), d.len()], [a.rows * rank, rank * b.columns()], "sizes of the products agree");
    if let Some(out) = bf16_product::quantised_product(a, b, Some(([c, d], rank))) {
        return out;
    }
    let mut sum = widened_product(a, b);
    let [c, d] = [Matrix::new(c, a.rows, rank), Matrix::new(d, rank, b.columns())].map(AnyMatrix::Single);
    narrow_product::add_product(&mut sum, b.columns(), c, d);
    bf16::narrowed(&sum)
}

/// Computes `a b` in single precision, for a processor without the instruction.
fn widened_product(a: Matrix<'_, bf16>, b: QuantisedOperand<'_>) -> Vec<f32> {
    let left = bf16::widened(a.data);
    product(a.with_data(&left), b, Rounding::Bf16)
}
