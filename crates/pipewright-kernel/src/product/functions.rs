//! Products in single precision.

use super::blocked::{self, Target};
use super::few_rows;
use super::kernel::Kernel;
use super::matrix::{Matrix, assert_fits, product_size};
use super::tile::{Join, Order};
use crate::simd::{fresh, written};

/// Computes `a b` into new memory, in row-major order.
pub fn product(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    new_memory(Order::Blocks, a, b)
}

/// Computes `out = a b`, in rows that begin `row_stride` elements apart.
pub fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
    join(Order::Blocks, Join::Replace, (out, row_stride), a, b);
}

/// Computes `out += a b`, in rows that begin `row_stride` elements apart.
pub fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
    join(Order::Blocks, Join::Add, (out, row_stride), a, b);
}

/// Returns `a b` in row-major order.
pub(crate) fn new_memory(order: Order, a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    let mut out = fresh::<f32>(product_size(a, b));
    let target = Target { start: out.as_mut_ptr().cast(), row_stride: b.columns, join: Join::Replace };
    // SAFETY: the processor has the kernel, and `out` has an element for each of the result, which are all replaced.
    unsafe {
        multiply(Kernel::detect(), order, target, a, b);
        written(out)
    }
}

/// Joins `a b` with `out`, in rows that begin `row_stride` elements apart. Pairs are added only in one block.
pub(crate) fn join(
    order: Order,
    join: Join,
    (out, row_stride): (&mut [f32], usize),
    a: Matrix<'_>,
    b: Matrix<'_>,
) {
    assert_fits(out.len(), a.rows, b.columns, row_stride);
    let target = Target { start: out.as_mut_ptr(), row_stride, join };
    // SAFETY: the processor has the kernel, and the assertion bounds every element of the result.
    unsafe { multiply(Kernel::detect(), order, target, a, b) };
}

/// Computes `a b`.
///
/// # Safety
/// The processor must have the instructions of the kernel. The target must have `a.rows` rows of `b.columns` elements
/// that nothing else uses, initialised unless they are replaced. Pairs are added only in one block.
pub(super) unsafe fn multiply(kernel: Kernel, order: Order, target: Target, a: Matrix<'_>, b: Matrix<'_>) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product agree");
    if a.columns == 0 && target.join != Join::Replace {
        // A sum of zero would change the sign of a negative zero.
        return;
    }
    // SAFETY: as the caller says.
    unsafe {
        if few_rows::is_faster(kernel, order, target, a, b) {
            few_rows::multiply(kernel, order, target, a, b);
        } else {
            blocked::multiply(kernel, order, target, a, b);
        }
    }
}
