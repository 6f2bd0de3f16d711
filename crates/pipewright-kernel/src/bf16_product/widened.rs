//! Products of bfloat16 on processors without the instructions, with the bits of AVX512-BF16. Operands are in single
//! precision and hold numbers of bfloat16.

use half::bf16;

use crate::half::Half;
use crate::product::{self, Join, Matrix, Order, assert_fits, flushed};

/// Computes `a b` into new memory, in row-major order.
pub(crate) fn product_in_single(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    product::new_memory(order_of(a, b), a, b)
}

/// Computes `out = a b`, in rows that begin `row_stride` elements apart.
pub(crate) fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
    product::join(order_of(a, b), Join::Replace, (out, row_stride), a, b);
}

/// Computes `out += a b`, in rows that begin `row_stride` elements apart.
pub(crate) fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
    assert_fits(out.len(), a.rows, b.columns, row_stride);
    let sums = product_in_single(a, b);
    for (row, sums) in sums.chunks_exact(b.columns.max(1)).enumerate() {
        for (out, sum) in out[row * row_stride..].iter_mut().zip(sums) {
            *out += sum;
        }
    }
}

/// Continues the sums with the products of an update, and rounds them.
pub(crate) fn rounded_with_update(mut sums: Vec<f32>, c: Matrix<'_>, d: Matrix<'_>) -> Vec<bf16> {
    product::join(Order::Blocks, Join::Continue, (&mut sums, d.columns), c, d);
    sums.iter_mut().for_each(|sum| *sum = flushed(*sum));
    bf16::narrowed(&sums)
}

/// Returns the order of a product.
fn order_of(a: Matrix<'_>, b: Matrix<'_>) -> Order {
    // With `e` as the bits of its exponent, a number of bfloat16 is a multiple of 2^(e - 134). If all products are
    // multiples of the least normal number, 2^-126, no sum is subnormal.
    let are_normal = least_exponent(a.data) + least_exponent(b.data) >= 2 * 134 - 126;
    if are_normal { Order::Pairs } else { Order::FlushedPairs }
}

/// Returns the least exponent of a number that is neither zero nor subnormal.
fn least_exponent(elements: &[f32]) -> u32 {
    let exponents = elements.iter().map(|element| (element.to_bits() >> 23) & 0xff);
    exponents.fold(0xff, |least, exponent| if exponent == 0 { least } else { least.min(exponent) })
}
