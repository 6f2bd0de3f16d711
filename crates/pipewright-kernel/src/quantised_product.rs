//! Products with a quantised matrix as the right operand ([`quantised`](crate::quantised)).

use half::bf16;

use crate::bf16_product;
use crate::half::Half;
use crate::narrow_product::{self, AnyMatrix};
use crate::product::{self, Matrix, is_parallel};
use crate::quantised::{QuantisedOperand, Rounding};

/// Computes `a b` into new memory, in row-major order, from elements that are rounded.
pub fn product(a: Matrix<'_>, b: QuantisedOperand<'_>, rounding: Rounding) -> Vec<f32> {
    let (rows, inner, columns) = (a.rows, b.inner(), b.columns());
    assert_eq!(a.columns, inner, "inner dimensions of a product agree");
    let mut out = vec![0.0; rows * columns];
    if rows == 0 || inner == 0 {
        return out;
    }
    let is_parallel = is_parallel(rows, columns, inner);
    let width = b.panel_columns().min(columns);
    let mut room = vec![0.0; width * inner];
    for first in (0..columns).step_by(width.max(1)) {
        let width = width.min(columns - first);
        b.panel([first, width], [0, inner], &mut room, is_parallel);
        rounding.round(&mut room[..width * inner]);
        let panel = if b.is_transposed() {
            Matrix::new(&room[..], width, inner).transposed()
        } else {
            Matrix::new(&room[..], inner, width)
        };
        product::product_into(&mut out[first..], columns, a, panel);
    }
    out
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
