//! The element types that operations read and write without a copy in single precision.

use half::bf16;
#[cfg(not(target_arch = "x86_64"))]
use stored::Stored;

#[cfg(target_arch = "x86_64")]
use crate::avx512::Stored;
use crate::bf16_product;
use crate::half::{narrow_into, narrow_over};
use crate::product::{self, Matrix, Sums};
use crate::quantised::{QuantisedOperand, Rounding};
use crate::quantised_product;
use crate::rounding::{narrow, widen};

#[cfg(not(target_arch = "x86_64"))]
mod stored {
    pub trait Stored: Copy {}

    impl Stored for f32 {}
    impl Stored for half::bf16 {}
}

/// An element of memory. Arithmetic is in single precision, in registers.
pub trait Element: Stored {
    /// Returns the number in single precision, exactly.
    fn single(self) -> f32;

    /// Returns the closest number of this type; ties go to the even one.
    fn rounded(single: f32) -> Self;

    /// Returns the closest numbers of this type: `single` itself if no number is rounded, or else numbers in
    /// `room`.
    fn all_rounded<'a>(single: &'a [f32], room: &'a mut Vec<Self>) -> &'a [Self];

    /// Replaces the elements of `out` by the closest numbers of this type.
    fn round_all(single: &[f32], out: &mut [Self]);

    /// Computes `out = a b`, in rows that begin `row_stride` elements apart.
    fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>);

    /// Like [`Element::product_into`], with results rounded to this type.
    fn rounded_product_into(out: &mut [Self], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>);

    /// Computes `out += a b`, in rows that begin `row_stride` elements apart.
    fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>);

    /// Computes `a b` for a quantised `b`, in rows that begin `row_stride` elements apart. In single precision, the elements
    /// of `b` are rounded first.
    fn quantised_product(
        sums: Sums<'_, Self>,
        row_stride: usize,
        a: Matrix<'_, Self>,
        b: QuantisedOperand<'_>,
        rounding: Rounding,
    );
}

impl Element for f32 {
    #[inline(always)]
    fn single(self) -> f32 {
        self
    }

    #[inline(always)]
    fn rounded(single: f32) -> Self {
        single
    }

    fn all_rounded<'a>(single: &'a [f32], _room: &'a mut Vec<Self>) -> &'a [Self] {
        single
    }

    fn round_all(single: &[f32], out: &mut [Self]) {
        out.copy_from_slice(single);
    }

    fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
        product::product_into(out, row_stride, a, b);
    }

    fn rounded_product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
        product::product_into(out, row_stride, a, b);
    }

    fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
        product::add_product(out, row_stride, a, b);
    }

    fn quantised_product(
        sums: Sums<'_, Self>,
        row_stride: usize,
        a: Matrix<'_>,
        b: QuantisedOperand<'_>,
        rounding: Rounding,
    ) {
        quantised_product::product_into(sums, row_stride, a, b, rounding);
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn single(self) -> f32 {
        widen(self)
    }

    #[inline(always)]
    fn rounded(single: f32) -> Self {
        narrow(single)
    }

    fn all_rounded<'a>(single: &'a [f32], room: &'a mut Vec<Self>) -> &'a [Self] {
        narrow_into(single, room);
        room
    }

    fn round_all(single: &[f32], out: &mut [Self]) {
        narrow_over(single, out);
    }

    fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>) {
        bf16_product::product_into(out, row_stride, a, b);
    }

    fn rounded_product_into(out: &mut [Self], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>) {
        bf16_product::rounded_product_into(out, row_stride, a, b);
    }

    fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>) {
        bf16_product::add_product(out, row_stride, a, b);
    }

    fn quantised_product(
        sums: Sums<'_, Self>,
        row_stride: usize,
        a: Matrix<'_, Self>,
        b: QuantisedOperand<'_>,
        _: Rounding,
    ) {
        quantised_product::half_product_into(sums, row_stride, a, b);
    }
}
