//! Conversion between single precision and the two types of half precision: bfloat16, which has the exponent
//! of single precision and 8 bits of mantissa, and f16, which has 5 bits of exponent and 11 of mantissa.

use std::mem::MaybeUninit;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use multiversion::multiversion;

#[cfg(target_arch = "x86_64")]
use super::bf16_instructions::Instructions;
use super::rounding::{narrow, widen};
use super::simd::{fresh, written};

/// A type of half precision. Its functions take slices, so that their loops are compiled with this crate's
/// optimisation.
pub trait Half: Copy {
    /// Returns the elements in single precision, exactly.
    fn widened(elements: &[Self]) -> Vec<f32>;

    /// Returns the elements in half precision: each is the closest number; ties go to the even one.
    fn narrowed(elements: &[f32]) -> Vec<Self>;
}

impl Half for bf16 {
    fn widened(elements: &[Self]) -> Vec<f32> {
        let mut widened = fresh(elements.len());
        widen_all(elements, &mut widened);
        // SAFETY: an element was written for each of `elements`, which are as many.
        unsafe { written(widened) }
    }

    fn narrowed(elements: &[f32]) -> Vec<Self> {
        let mut narrowed = fresh(elements.len());
        narrow_all(elements, &mut narrowed);
        // SAFETY: an element was written for each of `elements`, which are as many.
        unsafe { written(narrowed) }
    }
}

/// Replaces the elements of `narrowed` by `elements` in half precision, in the same memory if it is large
/// enough.
pub(crate) fn narrow_into(elements: &[f32], narrowed: &mut Vec<bf16>) {
    narrowed.clear();
    narrowed.reserve(elements.len());
    narrow_all(elements, &mut narrowed.spare_capacity_mut()[..elements.len()]);
    // SAFETY: an element was written for each of `elements`.
    unsafe { narrowed.set_len(elements.len()) };
}

/// Writes the elements in single precision, as far as both slices reach.
#[multiversion(targets = "simd")]
pub(crate) fn widen_all(elements: &[bf16], widened: &mut [MaybeUninit<f32>]) {
    for (to, &element) in widened.iter_mut().zip(elements) {
        to.write(widen(element));
    }
}

/// Replaces the elements of `narrowed` by as many `elements` in half precision.
pub(crate) fn narrow_over(elements: &[f32], narrowed: &mut [bf16]) {
    let len = narrowed.len();
    // SAFETY: the same memory; `narrow_all` writes elements, so they stay initialised.
    narrow_all(elements, unsafe { std::slice::from_raw_parts_mut(narrowed.as_mut_ptr().cast(), len) });
}

/// Writes the elements in half precision.
pub(crate) fn narrow_all(elements: &[f32], narrowed: &mut [MaybeUninit<bf16>]) {
    assert_eq!(elements.len(), narrowed.len(), "both have the same length");
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = Instructions::detect() {
        return instructions.narrow(elements, narrowed);
    }
    narrow_each(elements, narrowed);
}

#[multiversion(targets = "simd")]
fn narrow_each(elements: &[f32], narrowed: &mut [MaybeUninit<bf16>]) {
    for (to, &element) in narrowed.iter_mut().zip(elements) {
        to.write(narrow(element));
    }
}

/// The type's own conversions of slices use the processor's instructions where it has them.
impl Half for f16 {
    fn widened(elements: &[Self]) -> Vec<f32> {
        elements.to_f32_vec()
    }

    fn narrowed(elements: &[f32]) -> Vec<Self> {
        let mut narrowed = vec![Self::ZERO; elements.len()];
        narrowed.convert_from_f32_slice(elements);
        narrowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes under Miri")]
    fn slices_of_f16_are_rounded_as_single_numbers() {
        let numbers: Vec<f32> = (0..=u32::MAX).step_by(65_521 * 7).map(f32::from_bits).collect();
        let narrowed = f16::narrowed(&numbers);
        for ((&number, narrow), wide) in numbers.iter().zip(&narrowed).zip(f16::widened(&narrowed)) {
            let expected = f16::from_f32(number);
            assert_eq!(narrow.to_bits(), expected.to_bits(), "{number}");
            assert_eq!(wide.to_bits(), expected.to_f32().to_bits(), "{number}");
        }
    }

    #[test]
    fn memory_of_narrowed_numbers_is_used_again() {
        let mut narrowed = vec![bf16::ZERO; 5];
        let start = narrowed.as_ptr();
        narrow_into(&[1.5, 2.0, 1e-3], &mut narrowed);
        assert_eq!((narrowed.as_ptr(), &narrowed), (start, &bf16::narrowed(&[1.5, 2.0, 1e-3])));
    }
}
