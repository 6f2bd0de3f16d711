//! A quantised matrix as the right operand of a product, which decodes it in panels.

use rayon::prelude::*;

use super::decoded::Decoded;
use super::matrix::QuantisedMatrix;
use crate::product::Matrix;

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

    pub(crate) fn is_transposed(self) -> bool {
        self.is_transposed
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
    pub(crate) fn panel_columns(self) -> usize {
        let fitting = PANEL_BYTES / size_of::<f32>() / self.inner().max(1);
        let mut columns = fitting.max(LEAST_COLUMNS).next_multiple_of(LEAST_COLUMNS);
        // The `gemm` crate adds in another order for one column, so the last panel must not be one.
        while self.columns() > columns && self.columns() % columns == 1 {
            columns += LEAST_COLUMNS;
        }
        columns
    }
}
