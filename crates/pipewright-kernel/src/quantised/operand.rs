//! A quantised matrix as the right operand of a product, which decodes it in panels.

use rayon::prelude::*;

use super::decoded::{Decoded, Rounding};
#[cfg(target_arch = "x86_64")]
use super::matrix::Form;
use super::matrix::QuantisedMatrix;
use crate::product::{Matrix, is_parallel};

/// The bytes of a decoded panel, unless its columns are long.
const PANEL_BYTES: usize = 2 * 1024 * 1024;

/// The fewest columns of a panel.
const LEAST_COLUMNS: usize = 128;

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

    /// Returns the columns that are decoded fast together: neighbours in a row of the matrix, which share scales and a line of
    /// a cache, or one if the elements of a column are neighbours.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn neighbours(self) -> usize {
        match self.matrix.form() {
            _ if self.is_transposed => 1,
            Form::Blocks(_) => 256,
            _ => 128,
        }
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
        let [rows, columns] = if self.is_transposed {
            [first..first + width, start..start + depth]
        } else {
            [start..start + depth, first..first + width]
        };
        if is_parallel {
            let rooms = room.par_chunks_exact_mut(columns.len().max(1)).enumerate();
            rooms.for_each(|(index, room)| self.matrix.decode(rows.start + index, columns.clone(), room));
        } else {
            self.matrix.decode_rows(rows, columns, room);
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
        let width = (PANEL_BYTES / size_of::<f32>() / inner.max(1)).max(LEAST_COLUMNS);
        let mut room = vec![0.0; width.min(columns) * inner];
        for first in (0..columns).step_by(width) {
            let own = width.min(columns - first);
            let room = &mut room[..own * inner];
            self.panel([first, own], [0, inner], room, is_parallel);
            rounding.round(room);
            let panel = if self.is_transposed {
                Matrix::new(room, own, inner).transposed()
            } else {
                Matrix::new(room, inner, own)
            };
            multiply(first, panel);
        }
    }
}
