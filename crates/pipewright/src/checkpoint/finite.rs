//! Finds numbers that are not finite in the stored bytes of a tensor, in the pass that hashes them.

use std::fmt;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

/// The elements of a tensor that are not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotFinite {
    /// Elements that are NaN.
    pub nan: u64,
    /// Elements that are infinite, of either sign.
    pub infinite: u64,
}

impl NotFinite {
    /// Returns whether all elements are finite.
    pub(crate) fn is_empty(self) -> bool {
        self == Self::default()
    }

    pub(super) fn add(&mut self, other: Self) {
        self.nan += other.nan;
        self.infinite += other.infinite;
    }

    /// Counts the elements of a piece of a tensor's bytes, which begins and ends between two elements. Other
    /// types than floating point numbers are always finite.
    pub(crate) fn scan(&mut self, dtype: DType, bytes: &[u8]) {
        match dtype {
            DType::F64 => self.count(bytes, 0x7ff0_0000_0000_0000, u64::from_le_bytes),
            DType::F32 | DType::Flex32 => {
                self.count(bytes, 0x7f80_0000, |bytes| u32::from_le_bytes(bytes).into());
            }
            DType::F16 => self.count(bytes, 0x7c00, |bytes| u16::from_le_bytes(bytes).into()),
            DType::BF16 => self.count(bytes, 0x7f80, |bytes| u16::from_le_bytes(bytes).into()),
            _ => {}
        }
    }

    /// Counts the elements of `N` bytes whose `exponent` bits are all set.
    fn count<const N: usize>(&mut self, bytes: &[u8], exponent: u64, bits: impl Fn([u8; N]) -> u64) {
        let (elements, _) = bytes.as_chunks::<N>();
        let is_special = |element: &[u8; N]| bits(*element) & exponent == exponent;
        // The usual answer is no. This loop has no branches, so it runs at the speed of the memory.
        if !elements.iter().fold(false, |any, element| any | is_special(element)) {
            return;
        }
        let fraction = (exponent & exponent.wrapping_neg()) - 1;
        for element in elements.iter().filter(|element| is_special(element)) {
            match bits(*element) & fraction {
                0 => self.infinite += 1,
                _ => self.nan += 1,
            }
        }
    }
}

/// For example `3 elements that are NaN and 1 that is infinite`.
impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = |count| if count == 1 { "is" } else { "are" };
        let noun = |count| if count == 1 { "element" } else { "elements" };
        match (self.nan, self.infinite) {
            (nan, 0) => write!(f, "{nan} {} that {} NaN", noun(nan), verb(nan)),
            (0, infinite) => write!(f, "{infinite} {} that {} infinite", noun(infinite), verb(infinite)),
            (nan, infinite) => write!(
                f,
                "{nan} {} that {} NaN and {infinite} that {} infinite",
                noun(nan),
                verb(nan),
                verb(infinite)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{bf16, f16};

    use super::*;

    fn check(dtype: DType, bytes: &[u8], nan: u64, infinite: u64) {
        let mut found = NotFinite::default();
        found.scan(dtype, bytes);
        assert_eq!(found, NotFinite { nan, infinite }, "{dtype:?}");
    }

    #[test]
    fn every_float_type_is_counted() {
        let numbers = [0.0, -1.5, f64::MAX, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-300];
        check(DType::F64, &numbers.map(f64::to_le_bytes).concat(), 1, 2);
        // The largest number of `f64` is infinite in the smaller types.
        check(DType::F32, &numbers.map(|number| (number as f32).to_le_bytes()).concat(), 1, 3);
        check(DType::F16, &numbers.map(|number| f16::from_f64(number).to_le_bytes()).concat(), 1, 3);
        check(DType::BF16, &numbers.map(|number| bf16::from_f64(number).to_le_bytes()).concat(), 1, 3);
        check(DType::F32, &[f32::MAX, -f32::MAX, f32::MIN_POSITIVE].map(f32::to_le_bytes).concat(), 0, 0);
        check(DType::I32, &f32::NAN.to_le_bytes(), 0, 0);
    }

    #[test]
    fn counts_are_in_words() {
        let check = |nan, infinite, words: &str| assert_eq!(NotFinite { nan, infinite }.to_string(), words);
        check(1, 0, "1 element that is NaN");
        check(0, 2, "2 elements that are infinite");
        check(3, 1, "3 elements that are NaN and 1 that is infinite");
    }
}
