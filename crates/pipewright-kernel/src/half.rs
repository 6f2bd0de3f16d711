//! Conversion between single precision and the two types of half precision: bfloat16, which has the exponent of single
//! precision and 8 bits of mantissa, and f16, which has 5 bits of exponent and 11 of mantissa.

use half::{bf16, f16};

/// A type of half precision.
pub trait Half: Copy {
    /// Returns the number in single precision, exactly.
    fn widen(self) -> f32;

    /// Returns the closest number of this type; of two that are equally close, the even one.
    fn narrow(number: f32) -> Self;
}

/// Returns the elements in single precision, exactly.
pub fn widened<H: Half>(elements: &[H]) -> Vec<f32> {
    elements.iter().map(|element| element.widen()).collect()
}

/// Returns the elements in half precision: each is the closest number, and of two that are equally close the even one.
pub fn narrowed<H: Half>(elements: &[f32]) -> Vec<H> {
    elements.iter().map(|&element| H::narrow(element)).collect()
}

/// The conversions have no branch, so that the compiler makes vector instructions of the loops over them.
impl Half for bf16 {
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn narrow(number: f32) -> Self {
        let bits = number.to_bits();
        // Half of the last place, less one if that place is even: the carry then rounds to the closest number.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Rounding could turn a NaN into infinity, so it is cut, with a bit set that keeps it a NaN.
        let not_a_number = (bits >> 16) | 0x40;
        Self::from_bits((if number.is_nan() { not_a_number } else { rounded }) as u16)
    }
}

/// The type's own conversions use the processor's instructions where it has them.
impl Half for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn narrow(number: f32) -> Self {
        Self::from_f32(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_as_the_type_itself_rounds() {
        let patterns = (0..=u32::MAX).step_by(65_521 * 7).chain([
            0x0000_0001,
            0x7f7f_ffff,
            0x7f80_0000,
            0xff80_0000,
            0x7f80_0001,
            0x3f80_8000,
            0x3f81_8000,
            0x3f80_8001,
        ]);
        for bits in patterns {
            let number = f32::from_bits(bits);
            let (found, expected) = (bf16::narrow(number), bf16::from_f32(number));
            assert_eq!(found.to_bits(), expected.to_bits(), "{number} ({bits:#x})");
            let back = widened(&[found])[0];
            assert_eq!(back.to_bits(), expected.to_f32().to_bits(), "{number} ({bits:#x})");
        }
    }
}
