//! The products, with the instruction or without it.

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::{
    blocked::Instructions,
    results::{into_rows, new_memory},
    tile::Output,
};
use crate::half::Half;
use crate::product::{self, Matrix, assert_fits};

/// Returns whether the processor has the instruction. Without it, the functions of this module widen their
/// operands.
pub fn is_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return Instructions::detect().is_some();
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Computes `a b` into new memory, in row-major order. Each element is rounded once.
pub fn product(a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) -> Vec<bf16> {
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = Instructions::detect() {
        // SAFETY: the function writes each element.
        return unsafe { new_memory(instructions, a, b, Output::Rounded) };
    }
    bf16::narrowed(&product_in_single(a, b))
}

/// Computes `a b` into new memory in single precision, in row-major order.
pub fn product_in_single(a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) -> Vec<f32> {
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = Instructions::detect() {
        // SAFETY: the function writes each element.
        return unsafe { new_memory(instructions, a, b, Output::Single) };
    }
    widened(a, b, product::product)
}

/// Computes `out = a b`, in rows that begin `row_stride` elements apart.
pub fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = Instructions::detect() {
        return into_rows(instructions, (out, row_stride), a, b, Output::Single);
    }
    widened(a, b, |a, b| product::product_into(out, row_stride, a, b));
}

/// Like [`product_into`], with each element rounded once.
pub fn rounded_product_into(out: &mut [bf16], row_stride: usize, a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = Instructions::detect() {
        return into_rows(instructions, (out, row_stride), a, b, Output::Rounded);
    }
    let columns = b.columns;
    assert_fits(out.len(), a.rows, columns, row_stride);
    for (row, elements) in product(a, b).chunks_exact(columns.max(1)).enumerate() {
        out[row * row_stride..][..columns].copy_from_slice(elements);
    }
}

/// Computes `out += a b`, in rows that begin `row_stride` elements apart.
pub fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = Instructions::detect() {
        return into_rows(instructions, (out, row_stride), a, b, Output::Added);
    }
    widened(a, b, |a, b| product::add_product(out, row_stride, a, b));
}

/// Calls `multiply` with the operands in single precision.
fn widened<R>(
    a: Matrix<'_, bf16>,
    b: Matrix<'_, bf16>,
    multiply: impl FnOnce(Matrix<'_>, Matrix<'_>) -> R,
) -> R {
    let (left, right) = (bf16::widened(a.data), bf16::widened(b.data));
    multiply(a.with_data(&left), b.with_data(&right))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::numbers;

    /// The path of processors without the instruction has the bits of single precision.
    #[test]
    fn widened_operands_are_multiplied_in_single_precision() {
        let (m, n, k) = (9, 21, 70);
        let (a, b) = (numbers(m * k, 1), numbers(n * k, 2));
        let [half_a, half_b] = [&a, &b].map(|numbers| bf16::narrowed(numbers));
        let [a, b] = [&half_a, &half_b].map(|numbers| bf16::widened(numbers));
        let found =
            widened(Matrix::new(&half_a, m, k), Matrix::new(&half_b, n, k).transposed(), product::product);
        assert_eq!(found, product::product(Matrix::new(&a, m, k), Matrix::new(&b, n, k).transposed()));
    }
}
