//! A quantised matrix as the right operand of a product, which decodes it in panels.

use rayon::prelude::*;

use super::decoded::{Decoded, Rounding};
use super::matrix::QuantisedMatrix;
use crate::product::{Matrix, is_parallel};

/// The bytes of a decoded panel, unless its columns are long.
const PANEL_BYTES: usize = 2 * 1024 * 1024;

/// Panels have more columns of the product than this. The `gemm` crate adds in another order for so few rows and columns.
const FEW_COLUMNS: usize = 64;

/// Products of at most so many elements have an order of their own in the `gemm` crate if both operands have
/// neighbours along the inner dimension.
const FEW_ELEMENTS: usize = 256;

/// A quantised matrix as the right operand of a product.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedOperand<'a> {
    matrix: &'a QuantisedMatrix,
    /// Whether the rows of the matrix are the columns of the operand.
    is_transposed: bool,
    /// Whether the product has the bits of a product with the decoded matrix in columns.
    is_like_columns: bool,
}

impl<'a> QuantisedOperand<'a> {
    /// Returns `wᵀ` of a matrix `w`: the operand of a linear layer's forward, `x wᵀ`.
    pub fn transposed(matrix: &'a QuantisedMatrix) -> Self {
        Self { matrix, is_transposed: true, is_like_columns: false }
    }

    /// Returns the matrix itself: the operand of a linear layer's backward, `g w`.
    pub fn plain(matrix: &'a QuantisedMatrix) -> Self {
        Self { matrix, is_transposed: false, is_like_columns: false }
    }

    /// Returns the same operand, whose products have the bits of products with the decoded matrix in the order of its
    /// columns: the form in which linear layers hold it. Without this, the order follows its rows, as in a table.
    #[must_use]
    pub fn like_columns(self) -> Self {
        Self { is_like_columns: true, ..self }
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

    /// Calls `multiply` with panels in single precision, each with its first column, for a product with `rows` rows. The
    /// elements are rounded.
    pub(crate) fn each_panel(
        self,
        rows: usize,
        rounding: Rounding,
        mut multiply: impl FnMut(usize, Matrix<'_>),
    ) {
        let (inner, columns) = (self.inner(), self.columns());
        let is_parallel = is_parallel(rows, columns, inner);
        let width = (PANEL_BYTES / size_of::<f32>() / inner.max(1)).max(2 * FEW_COLUMNS);
        // The last panel has the columns that would be too few for a panel of their own.
        let last = if columns <= width + FEW_COLUMNS { columns } else { width + FEW_COLUMNS };
        let (mut room, mut turned) = (vec![0.0; last * inner], Vec::new());
        // A few rows or elements are added in an order that depends on the order of the elements in memory.
        let is_special = rows <= 1 || columns <= 1 || rows * columns <= FEW_ELEMENTS;
        let is_turned = if is_special {
            self.is_like_columns
        } else {
            self.is_transposed && rows * FEW_COLUMNS <= FEW_ELEMENTS
        };
        let mut first = 0;
        while first < columns {
            let own = if columns - first <= width + FEW_COLUMNS { columns - first } else { width };
            let room = &mut room[..own * inner];
            self.panel([first, own], [0, inner], room, is_parallel);
            rounding.round(room);
            let [lines, length] = if self.is_transposed { [own, inner] } else { [inner, own] };
            let panel = if is_turned {
                turned.clear();
                turned.extend(
                    (0..length).flat_map(|i| (0..lines).map(move |line| line * length + i)).map(|i| room[i]),
                );
                Matrix::new(&turned, length, lines)
            } else {
                Matrix::new(room, lines, length)
            };
            let is_transposed = self.is_transposed != is_turned;
            multiply(first, if is_transposed { panel.transposed() } else { panel });
            first += own;
        }
    }
}
