//! The element types into which quantised elements are decoded.

use half::{bf16, f16};
use multiversion::multiversion;

#[cfg(target_arch = "x86_64")]
use super::lookup::{self, Available, Lengths};
use crate::half::narrow_over;
use crate::rounding::{narrow, widen};

/// An element of a decoded panel.
pub(crate) trait Decoded: Copy + Send + Sync + 'static {
    /// Returns the closest number of this type; ties go to the even one.
    fn rounded(single: f32) -> Self;

    /// Writes the closest numbers of this type.
    fn round_all(singles: &[f32], out: &mut [Self]);

    /// Writes the rounded `code * scale` for codes of FP8.
    fn scaled_fp8(codes: &[u8], scale: f32, out: &mut [Self]);

    /// Writes the numbers of bfloat16 with these bytes.
    fn widened(halves: &[[u8; 2]], out: &mut [Self]);

    /// Writes the rounded `table[half] * scale` for halves of `bytes`, the upper half of each first.
    #[cfg(target_arch = "x86_64")]
    fn look_up(available: Available, bytes: &[u8], table: &[f32; 16], scale: f32, out: &mut [Self]);

    /// Like [`Decoded::look_up`], in blocks with scales of their own.
    #[cfg(target_arch = "x86_64")]
    fn look_up_blocks(
        available: Available,
        bytes: &[u8],
        table: &[f32; 16],
        scale_of: impl Fn(usize) -> f32,
        lengths: Lengths,
        out: &mut [Self],
    );

    /// Like [`Decoded::look_up`], for parts of `width` elements, whose bytes and scales `next` returns.
    #[cfg(target_arch = "x86_64")]
    fn look_up_parts<'a>(
        available: Available,
        table: &[f32; 16],
        next: impl FnMut() -> (&'a [u8], f32),
        width: usize,
        out: &mut [Self],
    );
}

impl Decoded for f32 {
    #[inline(always)]
    fn rounded(single: f32) -> Self {
        single
    }

    fn round_all(singles: &[f32], out: &mut [Self]) {
        out.copy_from_slice(singles);
    }

    fn scaled_fp8(codes: &[u8], scale: f32, out: &mut [Self]) {
        scaled_in_single(codes, scale, out);
    }

    fn widened(halves: &[[u8; 2]], out: &mut [Self]) {
        for (to, half) in out.iter_mut().zip(halves) {
            *to = widen(bf16::from_le_bytes(*half));
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn look_up(available: Available, bytes: &[u8], table: &[f32; 16], scale: f32, out: &mut [Self]) {
        lookup::single(available, bytes, table, scale, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn look_up_blocks(
        available: Available,
        bytes: &[u8],
        table: &[f32; 16],
        scale_of: impl Fn(usize) -> f32,
        lengths: Lengths,
        out: &mut [Self],
    ) {
        lookup::single_blocks(available, bytes, table, scale_of, lengths, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn look_up_parts<'a>(
        available: Available,
        table: &[f32; 16],
        next: impl FnMut() -> (&'a [u8], f32),
        width: usize,
        out: &mut [Self],
    ) {
        lookup::single_parts(available, table, next, width, out);
    }
}

impl Decoded for bf16 {
    #[inline(always)]
    fn rounded(single: f32) -> Self {
        narrow(single)
    }

    fn round_all(singles: &[f32], out: &mut [Self]) {
        narrow_over(singles, out);
    }

    fn scaled_fp8(codes: &[u8], scale: f32, out: &mut [Self]) {
        scaled_in_half(codes, scale, out);
    }

    fn widened(halves: &[[u8; 2]], out: &mut [Self]) {
        for (to, half) in out.iter_mut().zip(halves) {
            *to = bf16::from_le_bytes(*half);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn look_up(available: Available, bytes: &[u8], table: &[f32; 16], scale: f32, out: &mut [Self]) {
        lookup::half(available, bytes, table, scale, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn look_up_blocks(
        available: Available,
        bytes: &[u8],
        table: &[f32; 16],
        scale_of: impl Fn(usize) -> f32,
        lengths: Lengths,
        out: &mut [Self],
    ) {
        lookup::half_blocks(available, bytes, table, scale_of, lengths, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn look_up_parts<'a>(
        available: Available,
        table: &[f32; 16],
        next: impl FnMut() -> (&'a [u8], f32),
        width: usize,
        out: &mut [Self],
    ) {
        lookup::half_parts(available, table, next, width, out);
    }
}

#[multiversion(targets = "simd")]
fn scaled_in_single(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (to, &code) in out.iter_mut().zip(codes) {
        *to = scaled(code, scale);
    }
}

#[multiversion(targets = "simd")]
fn scaled_in_half(codes: &[u8], scale: f32, out: &mut [bf16]) {
    for (to, &code) in out.iter_mut().zip(codes) {
        *to = narrow(scaled(code, scale));
    }
}

/// Returns a code of FP8 times a scale.
#[inline(always)]
fn scaled(code: u8, scale: f32) -> f32 {
    /// The difference of the exponents' biases. The product with it is exact.
    const BIAS: f32 = f32::from_bits((127 + 120) << 23);
    let code = u32::from(code);
    f32::from_bits(((code & 0x7f) << 20) | ((code & 0x80) << 24)) * BIAS * scale
}

/// The type to whose numbers decoded elements are rounded before they are multiplied in single precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// They are not rounded.
    None,
    /// Bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Rounding {
    /// Rounds each element.
    pub fn round(self, elements: &mut [f32]) {
        match self {
            Self::None => {}
            Self::Bf16 => elements.iter_mut().for_each(|element| *element = widen(narrow(*element))),
            Self::F16 => elements.iter_mut().for_each(|element| *element = f16::from_f32(*element).to_f32()),
        }
    }
}
