//! Eight bits for each element (a sign, four bits of exponent and three of mantissa), with a scale for each block
//! of rows and columns: FP8 as DeepSeek publishes it (DeepSeek-AI, 2024, <https://arxiv.org/abs/2412.19437>).
//!
//! The numbers have no infinities (Micikevicius et al., 2022, <https://arxiv.org/abs/2209.05433>, E4M3).

use std::ops::Range;

use super::decoded::Decoded;
use super::error::CodebookError;

/// The code that is not a number, without its sign.
const NOT_A_NUMBER: u8 = 0x7f;

/// The elements of a matrix as eight bits each.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8 {
    codes: Vec<u8>,
    columns: usize,
    scales: Vec<f32>,
    /// The scales of a row.
    scale_columns: usize,
    /// The rows and columns of a block.
    block: [usize; 2],
    /// The row and column of the first element in its block.
    first: [usize; 2],
}

impl Fp8 {
    /// Returns the elements of a matrix of `rows` and `columns`, with a scale for each `block` of rows and columns, row
    /// by row.
    ///
    /// # Errors
    /// When a part has another length than the elements need, or a number is not finite.
    pub fn new(
        [rows, columns]: [usize; 2],
        codes: Vec<u8>,
        scales: Vec<f32>,
        block: [usize; 2],
    ) -> Result<Self, CodebookError> {
        if block.contains(&0) {
            return Err(CodebookError::Block);
        }
        let elements = rows.saturating_mul(columns);
        if codes.len() != elements {
            return Err(CodebookError::Codes { needed: elements });
        }
        let scale_columns = columns.div_ceil(block[1]);
        let needed = rows.div_ceil(block[0]) * scale_columns;
        if scales.len() != needed {
            return Err(CodebookError::Scales { needed });
        }
        let are_finite = scales.iter().all(|scale| scale.is_finite());
        if !are_finite || codes.iter().any(|code| code & NOT_A_NUMBER == NOT_A_NUMBER) {
            return Err(CodebookError::NotFinite);
        }
        Ok(Self { codes, columns, scales, scale_columns, block, first: [0, 0] })
    }

    /// Writes the elements `columns` of a row.
    pub(super) fn decode<T: Decoded>(&self, row: usize, columns: Range<usize>, out: &mut [T]) {
        assert!(columns.end <= self.columns && out.len() == columns.len(), "the row has these elements");
        let scales = &self.scales[(self.first[0] + row) / self.block[0] * self.scale_columns..];
        let codes = &self.codes[row * self.columns..][columns.clone()];
        let mut column = columns.start;
        while column < columns.end {
            let place = self.first[1] + column;
            let block = place / self.block[1];
            let count = ((block + 1) * self.block[1] - place).min(columns.end - column);
            let start = column - columns.start;
            T::scaled_fp8(&codes[start..][..count], scales[block], &mut out[start..][..count]);
            column += count;
        }
    }

    /// Returns the rows and columns of a part.
    pub(super) fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let [first_row, first_column] = [self.first[0] + rows.start, self.first[1] + columns.start];
        let end = [self.first[0] + rows.end, self.first[1] + columns.end];
        let own =
            |first: usize, end: usize, block: usize| first / block..end.div_ceil(block).max(first / block);
        let (scale_rows, scale_columns) =
            (own(first_row, end[0], self.block[0]), own(first_column, end[1], self.block[1]));
        let scales =
            scale_rows.flat_map(|row| &self.scales[row * self.scale_columns..][scale_columns.clone()]);
        let codes = rows.flat_map(|row| &self.codes[row * self.columns..][columns.clone()]);
        Self {
            codes: codes.copied().collect(),
            columns: columns.len(),
            scales: scales.copied().collect(),
            scale_columns: scale_columns.len(),
            block: self.block,
            first: [first_row % self.block[0], first_column % self.block[1]],
        }
    }

    /// Returns the rows with these indices, each with scales of its own.
    pub(super) fn gathered(&self, rows: &[usize]) -> Self {
        let scales = |row: usize| {
            let start = (self.first[0] + row) / self.block[0] * self.scale_columns;
            &self.scales[start..][..self.scale_columns]
        };
        Self {
            codes: rows
                .iter()
                .flat_map(|row| &self.codes[row * self.columns..][..self.columns])
                .copied()
                .collect(),
            scales: rows.iter().flat_map(|&row| scales(row)).copied().collect(),
            block: [1, self.block[1]],
            first: [0, self.first[1]],
            ..*self
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.codes.len() + 4 * self.scales.len()
    }

    pub(super) fn addresses(&self) -> Vec<usize> {
        vec![self.codes.as_ptr().addr(), self.scales.as_ptr().addr()]
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }
}
