//! The memory of a result: allocated for it, or rows of existing memory.

use half::bf16;

use super::available::Available;
use super::blocked::{Target, multiply};
use super::tile::{Output, Update};
use crate::product::{Matrix, assert_fits, product_size};
use crate::simd::{fresh, written};

/// Returns `a b` in row-major order.
///
/// # Safety
/// The output that `output` makes must write each element and read none. The operands of the update must have
/// as many rows and columns as the result.
pub(super) unsafe fn new_memory<T>(
    available: Available,
    a: Matrix<'_, bf16>,
    b: Matrix<'_, bf16>,
    output: fn(*mut T) -> Output,
    update: Option<Update>,
) -> Vec<T> {
    let mut out = fresh::<T>(product_size(a, b));
    let target = Target { output: output(out.as_mut_ptr().cast()), row_stride: b.columns, update };
    // SAFETY: `out` has an element for each of the result, and each is written, as the caller says.
    unsafe {
        multiply(available, a, b, target);
        written(out)
    }
}

/// Computes `a b` in rows of `out` that begin `row_stride` elements apart.
pub(super) fn into_rows<T>(
    available: Available,
    (out, row_stride): (&mut [T], usize),
    a: Matrix<'_, bf16>,
    b: Matrix<'_, bf16>,
    output: fn(*mut T) -> Output,
) {
    assert_fits(out.len(), a.rows, b.columns, row_stride);
    let target = Target { output: output(out.as_mut_ptr()), row_stride, update: None };
    // SAFETY: the assertion bounds every element of the result.
    unsafe { multiply(available, a, b, target) };
}
