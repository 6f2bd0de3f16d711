//! A right operand that is packed once for several products, such as a weight for the microbatches of a step.

use super::blocked::{Right, Target, multiply};
use super::definition::BLOCK;
use super::kernel::Kernel;
use super::matrix::{Matrix, assert_fits};
use super::pack::{Panel, Vectors};
use super::tile::{Join, Order};
use crate::scratch::Scratch;

/// A packed right operand. It has the elements of the matrix, with its columns filled up to a whole panel, and it replaces
/// the matrix.
pub struct Packed {
    kernel: Kernel,
    /// For each block of the inner dimension, its panels.
    panels: Scratch,
    inner: usize,
    columns: usize,
}

impl Packed {
    /// Packs a matrix.
    pub fn new(matrix: Matrix<'_>) -> Self {
        let (kernel, vectors) = (Kernel::detect(), Vectors::columns_of(matrix));
        let ([_, width], inner) = (kernel.size(), matrix.rows);
        let mut panels = Scratch::exact(matrix.columns.next_multiple_of(width) * inner);
        let mut into: *mut f32 = panels.as_mut_ptr().cast();
        for start in (0..inner).step_by(BLOCK) {
            let depth = BLOCK.min(inner - start);
            for first in (0..matrix.columns).step_by(width) {
                // SAFETY: the processor has the kernel, and the memory has all panels.
                unsafe {
                    kernel.pack(vectors, Panel { first, width, start, depth, is_flushed: false }, into);
                    into = into.add(width * depth);
                }
            }
        }
        Self { kernel, panels, inner, columns: matrix.columns }
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Computes `out = a b` for this `b`, in rows that begin `row_stride` elements apart, with the bits of
    /// [`product_into`](super::product_into).
    pub fn product_into(&self, out: &mut [f32], row_stride: usize, a: Matrix<'_>) {
        assert_eq!(a.columns, self.inner, "inner dimensions of a product agree");
        assert_fits(out.len(), a.rows, self.columns, row_stride);
        let target = Target { start: out.as_mut_ptr(), row_stride, join: Join::Replace };
        let right = Right::Packed { start: self.panels.as_ptr().cast(), columns: self.columns };
        // SAFETY: the assertions bound the result, and the panels are those of the kernel.
        unsafe { multiply(self.kernel, Order::Blocks, target, a, right) };
    }
}
