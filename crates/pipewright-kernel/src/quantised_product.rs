//! Products with a quantised matrix as the right operand ([`quantised`](crate::quantised)).

use half::bf16;

use crate::bf16_product;
use crate::half::Half;
use crate::narrow_product::{self, AnyMatrix};
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
    assert_eq!(a.columns, b.inner(), "inner dimensions of a product agree");
    let is_added = matches!(sums, Sums::Added(_));
    let multiply = if is_added { product::add_product } else { product::product_into };
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
    let left = bf16::widened(a.data);
    let left = a.with_data(&left);
    let of_single = |sums| product_into(sums, row_stride, left, b, Rounding::Bf16);
    match sums {
        Sums::Single(out) => of_single(Sums::Single(out)),
        Sums::Added(out) => of_single(Sums::Added(out)),
        Sums::Rounded(out) => {
            let rows = bf16::narrowed(&product(left, b, Rounding::Bf16));
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
