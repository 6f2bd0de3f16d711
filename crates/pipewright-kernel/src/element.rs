//! The element types that operations read and write without a copy in single precision.

use half::bf16;

use crate::bf16_product;
use crate::half::{narrow, narrow_into, widen};
use crate::product::{self, Matrix};

/// An element of memory. Arithmetic is in single precision, in registers.
pub trait Element: Copy {
    /// Returns the number in single precision, exactly.
    fn single(self) -> f32;

    /// Returns the closest number of this type; ties go to the even one.
    fn rounded(single: f32) -> Self;

    /// Returns the closest numbers of this type, in `room` if they are not the same numbers.
    fn all_rounded<'a>(single: &'a [f32], room: &'a mut Vec<Self>) -> &'a [Self];

    /// Computes `out = a b`, in rows that begin `row_stride` elements apart.
    fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>);

    /// Like [`Element::product_into`], with results rounded to this type.
    fn rounded_product_into(out: &mut [Self], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>);

    /// Computes `out += a b`, in rows that begin `row_stride` elements apart.
    fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>);
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

    fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
        product::product_into(out, row_stride, a, b);
    }

    fn rounded_product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
        product::product_into(out, row_stride, a, b);
    }

    fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>) {
        product::add_product(out, row_stride, a, b);
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

    fn product_into(out: &mut [f32], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>) {
        bf16_product::product_into(out, row_stride, a, b);
    }

    fn rounded_product_into(out: &mut [Self], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>) {
        bf16_product::rounded_product_into(out, row_stride, a, b);
    }

    fn add_product(out: &mut [f32], row_stride: usize, a: Matrix<'_, Self>, b: Matrix<'_, Self>) {
        bf16_product::add_product(out, row_stride, a, b);
    }
}
