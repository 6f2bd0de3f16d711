//! Products of bfloat16 on processors without the instructions, with the bits of AVX512-BF16. Operands are in single
//! precision and hold numbers of bfloat16.

use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;
use multiversion::multiversion;

use crate::half::Half;
use crate::product::{self, BLOCK, Join, Matrix, Order, assert_fits, flushed};
use crate::threads::{self, CHUNK};

/// Rows whose sums are computed before they are added. With so many, packing the right operand again for each strip takes a
/// small share of the time.
const STRIP: usize = 512;

/// Rows that a thread adds at once.
const ADDED: usize = 16;

/// The left operand of products.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    matrix: Matrix<'a>,
    least_exponent: u32,
}

impl<'a> Left<'a> {
    pub(crate) fn new(matrix: Matrix<'a>) -> Self {
        Self { matrix, least_exponent: least_exponent(matrix.data) }
    }

    /// Computes `out = a b` or `out += a b`, in rows that begin `row_stride` elements apart.
    pub(crate) fn join(self, join: Join, (out, row_stride): (&mut [f32], usize), b: Matrix<'_>) {
        let (a, order) = (self.matrix, self.order(b));
        if join == Join::Replace || a.columns <= BLOCK {
            return product::join(order, join, (out, row_stride), a, b);
        }
        // A sum that has several blocks is added when it is complete.
        assert_fits(out.len(), a.rows, b.columns, row_stride);
        let columns = b.columns.max(1);
        // A single row fits with any stride.
        let row_stride = row_stride.max(columns);
        let mut sums = vec![0.0; a.rows.min(STRIP) * b.columns];
        for (first, out) in (0..a.rows).step_by(STRIP).zip(out.chunks_mut(STRIP * row_stride)) {
            let strip =
                Matrix { data: &a.data[first * a.row_stride..], rows: STRIP.min(a.rows - first), ..a };
            let sums = &mut sums[..strip.rows * b.columns];
            product::join(order, Join::Replace, (sums, b.columns), strip, b);
            let rows = out.chunks_mut(ADDED * row_stride).zip(sums.chunks(ADDED * columns));
            threads::for_each(rows, strip.rows * columns, |(out, sums)| {
                for (out, sums) in out.chunks_mut(row_stride).zip(sums.chunks(columns)) {
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
                }
            });
        }
    }

    /// Returns the order of the product with `b`.
    fn order(self, b: Matrix<'_>) -> Order {
        // With `e` as the bits of its exponent, a number of bfloat16 is a multiple of 2^(e - 134). If all products are
        // multiples of the least normal number, 2^-126, no sum is subnormal.
        let [a, b] = [self.least_exponent, least_exponent(b.data)];
        let are_normal = a > 0 && b > 0 && a + b >= 2 * 134 - 126;
        if are_normal { Order::Pairs } else { Order::FlushedPairs }
    }
}

/// Computes `a b` into new memory, in row-major order.
pub(crate) fn product_in_single(a: Left<'_>, b: Matrix<'_>) -> Vec<f32> {
    product::new_memory(a.order(b), a.matrix, b)
}

/// Continues the sums with the products of an update, and rounds them.
pub(crate) fn rounded_with_update(mut sums: Vec<f32>, c: Matrix<'_>, d: Matrix<'_>) -> Vec<bf16> {
    product::join(Order::Blocks, Join::Continue, (&mut sums, d.columns), c, d);
    sums.iter_mut().for_each(|sum| *sum = flushed(*sum));
    bf16::narrowed(&sums)
}

/// Returns the least exponent of a number other than zero. It is zero if the number is subnormal.
fn least_exponent(elements: &[f32]) -> u32 {
    let least = AtomicU32::new(0xff);
    threads::for_each(elements.chunks(CHUNK), elements.len(), |chunk| {
        least.fetch_min(least_of(chunk), Ordering::Relaxed);
    });
    least.into_inner()
}

#[multiversion(targets = "simd")]
fn least_of(elements: &[f32]) -> u32 {
    // Less one, zero is the largest magnitude.
    let magnitudes = elements.iter().map(|element| element.abs().to_bits().wrapping_sub(1));
    (magnitudes.fold(f32::INFINITY.to_bits() - 1, u32::min) + 1) >> 23
}
