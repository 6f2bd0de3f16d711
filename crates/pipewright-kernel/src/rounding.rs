//! Conversion of a number between single precision and bfloat16.

use half::bf16;

#[inline(always)]
pub(crate) fn widen(element: bf16) -> f32 {
    f32::from_bits(u32::from(element.to_bits()) << 16)
}

/// Has no branch, so that the compiler makes vector instructions of the loop over it.
#[inline(always)]
pub(crate) fn narrow(element: f32) -> bf16 {
    let bits = element.to_bits();
    // Half of the last place, less one if that place is even: the carry then rounds to the closest number.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding could turn a NaN into infinity, so it is cut, with a bit set that keeps it a NaN.
    let not_a_number = (bits >> 16) | 0x40;
    bf16::from_bits((if element.is_nan() { not_a_number } else { rounded }) as u16)
}
