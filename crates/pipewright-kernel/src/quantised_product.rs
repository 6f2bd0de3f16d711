//! Products with a quantised matrix as the right operand ([`quantised`](crate::quantised)).

use half::bf16;

use crate::bf16_product::{self, widened};
use crate::half::Half;
use crate::product::{self, Matrix, Sums, assert_fits};
use crate::quantised::{QuantisedOperand, Rounding};

/// Computes `a b` into new memory, in row-major order, from elements that are rounded.
pub fn product(a: Matrix<'_>, b: QuantisedOperand<'_>, rounding: Rounding) -> Vec<f32> {
    let mut out = vec![0.0; a.rows * b.columns()];
    product_into(Sums::Single(&mut out), b.columns(), a, b, rounding);
    out
}

/// Computes `a b` in rows that begin `row_stride` elements apart, from elements that are rounded.
pub(crate) fn product_into(
    sums: Sums<'_, f32>,
    row_stride: usize,
    a: Matrix<'_>,
    b: QuantisedOperand<'_>,
    rounding: Rounding,
) {
    multiply_panels(sums, row_stride, a, b, rounding, [product::product_into, product::add_product]);
}

/// Computes `out = a b` or `out += a b`, in rows that begin so many elements apart.
type Multiply = fn(&mut [f32], usize, Matrix<'_>, Matrix<'_>);

/// Multiplies panels of `b` by one of two functions: for sums that are written, and for those that are added.
fn multiply_panels(
    sums: Sums<'_, f32>,
    row_stride: usize,
    a: Matrix<'_>,
    b: QuantisedOperand<'_>,
    rounding: Rounding,
    [into, add]: [Multiply; 2],
) {
    assert_eq!(a.columns, b.inner(), "inner dimensions of a product agree");
    let multiply = if matches!(sums, Sums::Added(_)) { add } else { into };
    let (Sums::Single(out) | Sums::Rounded(out) | Sums::Added(out)) = sums;
    assert_fits(out.len(), a.rows, b.columns(), row_stride);
    if a.rows > 0 {
        b.each_panel(a.rows, rounding, |first, panel| multiply(&mut out[first..], row_stride, a, panel));
    }
}

/// Like [`product_into`], in bfloat16.
pub(crate) fn half_product_into(
    mut sums: Sums<'_, bf16>,
    row_stride: usize,
    a: Matrix<'_, bf16>,
    b: QuantisedOperand<'_>,
) {
    if bf16_product::quantised_product_into(&mut sums, row_stride, a, b) {
        return;
    }
    match sums {
        Sums::Single(out) => widened_product(Sums::Single(out), row_stride, a, b),
        Sums::Added(out) => widened_product(Sums::Added(out), row_stride, a, b),
        Sums::Rounded(out) => {
            let rows = bf16::narrowed(&new_widened_product(a, b));
            for (row, elements) in rows.chunks_exact(b.columns().max(1)).enumerate() {
                out[row * row_stride..][..b.columns()].copy_from_slice(elements);
            }
        }
    }
}

/// Computes `a b` in bfloat16 into new memory, in row-major order. The elements of `b` are rounded to
/// bfloat16, and each element of the result is rounded once.
pub fn half_product(a: Matrix<'_, bf16>, b: QuantisedOperand<'_>) -> Vec<bf16> {
    if let Some(out) = bf16_product::quantised_product(a, b, None) {
        return out;
    }
    bf16::narrowed(&new_widened_product(a, b))
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
    let [c, d] = [Matrix::new(c, a.rows, rank), Matrix::new(d, rank, b.columns())];
    widened::rounded_with_update(new_widened_product(a, b), c, d)
}

/// Computes `a b` in single precision, for a processor without the instruction.
fn new_widened_product(a: Matrix<'_, bf16>, b: QuantisedOperand<'_>) -> Vec<f32> {
    let mut out = vec![0.0; a.rows * b.columns()];
    widened_product(Sums::Single(&mut out), b.columns(), a, b);
    out
}

/// Like [`new_widened_product`], in rows that begin `row_stride` elements apart.
fn widened_product(sums: Sums<'_, f32>, row_stride: usize, a: Matrix<'_, bf16>, b: QuantisedOperand<'_>) {
    let left = a.widened_lines();
    let multiply: [Multiply; 2] = [widened::product_into, widened::add_product];
    multiply_panels(sums, row_stride, a.with_lines(&left), b, Rounding::Bf16, multiply);
}
