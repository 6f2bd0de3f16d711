//! Products with a quantised matrix as the right operand ([`quantised`](crate::quantised)).

use half::bf16;

use crate::bf16_product::{
    self,
    widened::{self, Left},
};
use crate::half::Half;
use crate::product::{self, Join, Matrix, Order, Sums, assert_fits};
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
    multiply_panels(sums, row_stride, [a.rows, a.columns], b, rounding, |join, out, panel| {
        product::join(Order::Blocks, join, (out, row_stride), a, panel);
    });
}

/// Multiplies panels of `b` by a function that joins a product with some columns of the result.
fn multiply_panels(
    sums: Sums<'_, f32>,
    row_stride: usize,
    [rows, inner]: [usize; 2],
    b: QuantisedOperand<'_>,
    rounding: Rounding,
    multiply: impl Fn(Join, &mut [f32], Matrix<'_>),
) {
    assert_eq!(inner, b.inner(), "inner dimensions of a product agree");
    let join = if matches!(sums, Sums::Added(_)) { Join::Add } else { Join::Replace };
    let (Sums::Single(out) | Sums::Rounded(out) | Sums::Added(out)) = sums;
    assert_fits(out.len(), rows, b.columns(), row_stride);
    if rows > 0 {
        b.each_panel(rows, rounding, |first, panel| multiply(join, &mut out[first..], panel));
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
    let widened = a.widened_lines();
    let left = Left::new(a.with_lines(&widened));
    multiply_panels(sums, row_stride, [a.rows, a.columns], b, Rounding::Bf16, |join, out, panel| {
        left.join(join, (out, row_stride), panel);
    });
}
