//! Elements that are floats as files have them, for matrices that are read from a file whenever they are needed. They are
//! not quantised: a panel of a product is widened or rounded as it would be decoded.

use std::ops::Range;

use half::f16;

use super::decoded::Decoded;
use super::error::CodebookError;

/// The element type of floats in a file. They are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatType {
    /// Bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Single precision.
    F32,
}

impl FloatType {
    /// Returns the bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// The elements of a matrix as the bytes of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Plain {
    bytes: Vec<u8>,
    columns: usize,
    kind: FloatType,
}

impl Plain {
    /// Returns the elements of a matrix of `rows` and `columns`.
    ///
    /// # Errors
    /// When there is another number of bytes than the elements need, or a number is not finite.
    pub fn new([rows, columns]: [usize; 2], bytes: Vec<u8>, kind: FloatType) -> Result<Self, CodebookError> {
        let needed = rows.saturating_mul(columns).saturating_mul(kind.bytes());
        if bytes.len() != needed {
            return Err(CodebookError::Codes { needed });
        }
        let has = |mask: u16, halves: &[[u8; 2]]| {
            // Without an early end, the loop is vectorised.
            halves.iter().fold(false, |found, half| found | (u16::from_le_bytes(*half) & mask == mask))
        };
        let is_infinite = match kind {
            FloatType::Bf16 => has(0x7f80, bytes.as_chunks().0),
            FloatType::F16 => has(0x7c00, bytes.as_chunks().0),
            FloatType::F32 => {
                let single = |found: bool, bytes: &[u8; 4]| found | !f32::from_le_bytes(*bytes).is_finite();
                bytes.as_chunks().0.iter().fold(false, single)
            }
        };
        if is_infinite { Err(CodebookError::NotFinite) } else { Ok(Self { bytes, columns, kind }) }
    }

    /// Writes the elements `columns` of a row.
    pub(super) fn decode<T: Decoded>(&self, row: usize, columns: Range<usize>, out: &mut [T]) {
        assert!(columns.end <= self.columns && out.len() == columns.len(), "the row has these elements");
        let bytes = self.bytes_of(row, columns);
        match self.kind {
            FloatType::Bf16 => T::widened(bytes.as_chunks().0, out),
            FloatType::F16 => {
                for (to, half) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *to = T::rounded(f16::from_le_bytes(*half).to_f32());
                }
            }
            FloatType::F32 => {
                for (to, single) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *to = T::rounded(f32::from_le_bytes(*single));
                }
            }
        }
    }

    fn bytes_of(&self, row: usize, columns: Range<usize>) -> &[u8] {
        let (start, size) = (row * self.columns + columns.start, self.kind.bytes());
        &self.bytes[start * size..][..columns.len() * size]
    }

    /// Returns the rows and columns of a part.
    pub(super) fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let bytes = rows.flat_map(|row| self.bytes_of(row, columns.clone())).copied().collect();
        Self { bytes, columns: columns.len(), kind: self.kind }
    }

    /// Returns the rows with these indices.
    pub(super) fn gathered(&self, rows: &[usize]) -> Self {
        let bytes = rows.iter().flat_map(|&row| self.bytes_of(row, 0..self.columns)).copied().collect();
        Self { bytes, ..*self }
    }

    pub(super) fn storage(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::quantised::{Form, QuantisedMatrix};

    /// Returns the matrix of `rows` and three columns with these numbers in an element type.
    fn matrix(numbers: &[f32], kind: FloatType) -> Result<QuantisedMatrix, CodebookError> {
        let bytes = numbers.iter().flat_map(|&number| match kind {
            FloatType::Bf16 => bf16::from_f32(number).to_le_bytes().to_vec(),
            FloatType::F16 => f16::from_f32(number).to_le_bytes().to_vec(),
            FloatType::F32 => number.to_le_bytes().to_vec(),
        });
        let rows = numbers.len() / 3;
        let plain = Plain::new([rows, 3], bytes.collect(), kind)?;
        Ok(QuantisedMatrix::new(rows, Form::Plain(plain)))
    }

    #[test]
    fn elements_are_those_of_the_file() {
        let numbers: Vec<f32> = (0..12).map(|index| index as f32 * 0.25 - 1.0).collect();
        for kind in [FloatType::Bf16, FloatType::F16, FloatType::F32] {
            let matrix = matrix(&numbers, kind).expect("finite numbers");
            assert_eq!((matrix.decoded(), matrix.bytes()), (numbers.clone(), 12 * kind.bytes()));
            let part = matrix.part(1..3, 1..3).expect("any part").decoded();
            assert_eq!(part, [&numbers[4..6], &numbers[7..9]].concat());
            let gathered = matrix.gathered(&[3, 0]).expect("any rows").decoded();
            assert_eq!(gathered, [&numbers[9..], &numbers[..3]].concat());
            let mut halves = [bf16::ZERO; 2];
            matrix.decode(2, 1..3, &mut halves);
            assert_eq!(halves.map(bf16::to_f32), numbers[7..9]);
        }
    }

    #[test]
    fn numbers_that_are_not_finite_are_refused() {
        for kind in [FloatType::Bf16, FloatType::F16, FloatType::F32] {
            for number in [f32::NAN, f32::NEG_INFINITY] {
                assert_eq!(matrix(&[0.0, 1.0, number], kind), Err(CodebookError::NotFinite));
            }
        }
        let short = Plain::new([2, 3], vec![0; 11], FloatType::Bf16);
        assert_eq!(short, Err(CodebookError::Codes { needed: 12 }));
    }
}
