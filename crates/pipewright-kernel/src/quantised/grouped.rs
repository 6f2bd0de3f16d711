//! Four bits for each element, with a zero and a scale for each group of neighbouring elements of a row: the
//! matrices of GPTQ (Frantar et al., 2022, <https://arxiv.org/abs/2210.17323>) and AWQ (Lin et al., 2023,
//! <https://arxiv.org/abs/2306.00978>). An element is `(code - zero) * scale`.

use std::ops::Range;

use super::decoded::Decoded;
use super::eights::{self, BlocksOfRuns, Factors, InEights};
use super::error::CodebookError;

/// The largest zero: the largest code.
const LARGEST_ZERO: u8 = 15;

/// The differences of all codes from each zero.
static DIFFERENCES: [[f32; 16]; LARGEST_ZERO as usize + 1] = {
    let mut differences = [[0.0; 16]; LARGEST_ZERO as usize + 1];
    let mut zero = 0;
    while zero < differences.len() {
        let mut code = 0;
        while code < 16 {
            differences[zero][code] = (code as i32 - zero as i32) as f32;
            code += 1;
        }
        zero += 1;
    }
    differences
};

/// The elements of a matrix as four bits each, in groups.
#[derive(Clone, Debug, PartialEq)]
pub struct Grouped {
    /// The codes of each row, from a whole byte on: the upper half of a byte first.
    codes: Vec<u8>,
    columns: usize,
    zeros: Vec<u8>,
    scales: Vec<f32>,
    /// The groups of a row.
    groups: usize,
    /// The elements of a group.
    group: usize,
    /// The place of the first column in its group.
    first: usize,
}

impl Grouped {
    /// Returns the elements of a matrix of `rows` and `columns`, with a zero and a scale for each `group` of elements of
    /// a row. Each row of codes has whole bytes.
    ///
    /// # Errors
    /// When a part has another length than the elements need, or a number is not finite or too large.
    pub fn new(
        [rows, columns]: [usize; 2],
        codes: Vec<u8>,
        zeros: Vec<u8>,
        scales: Vec<f32>,
        group: usize,
    ) -> Result<Self, CodebookError> {
        if group == 0 {
            return Err(CodebookError::Block);
        }
        let needed = rows.saturating_mul(columns.div_ceil(2));
        if codes.len() != needed {
            return Err(CodebookError::Codes { needed });
        }
        let groups = columns.div_ceil(group);
        let needed = rows * groups;
        if scales.len() != needed || zeros.len() != needed {
            return Err(CodebookError::Scales { needed });
        }
        if scales.iter().any(|scale| !scale.is_finite()) || zeros.iter().any(|zero| *zero > LARGEST_ZERO) {
            return Err(CodebookError::NotFinite);
        }
        Ok(Self { codes, columns, zeros, scales, groups, group, first: 0 })
    }

    /// Writes the elements `columns` of a row.
    pub(super) fn decode<T: Decoded>(&self, row: usize, columns: Range<usize>, out: &mut [T]) {
        assert!(columns.end <= self.columns && out.len() == columns.len(), "the row has these elements");
        #[cfg(target_arch = "x86_64")]
        let available = super::lookup::Available::detect();
        let bytes = self.columns.div_ceil(2);
        let codes = &self.codes[row * bytes..][..bytes];
        let (mut column, mut out) = (columns.start, out);
        while column < columns.end {
            let place = self.first + column;
            let group = row * self.groups + place / self.group;
            let count = (self.group - place % self.group).min(columns.end - column);
            let (own, rest) = out.split_at_mut(count);
            let (table, scale) = (&DIFFERENCES[usize::from(self.zeros[group])], self.scales[group]);
            let start = column;
            (out, column) = (rest, column + count);
            #[cfg(target_arch = "x86_64")]
            if let Some(available) = available.filter(|_| start.is_multiple_of(2)) {
                T::look_up(available, &codes[start / 2..(start + count).div_ceil(2)], table, scale, own);
                continue;
            }
            let scaled = table.map(|difference| T::rounded(difference * scale));
            for (index, to) in (start..).zip(own) {
                let byte = codes[index / 2];
                *to = scaled[usize::from(if index.is_multiple_of(2) { byte >> 4 } else { byte & 15 })];
            }
        }
    }

    /// Returns the rows and columns of a part.
    pub(super) fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let bytes = self.columns.div_ceil(2);
        let mut codes = vec![0; rows.len() * columns.len().div_ceil(2)];
        let into = codes.chunks_exact_mut(columns.len().div_ceil(2).max(1));
        for (row, into) in rows.clone().zip(into) {
            for (index, column) in columns.clone().enumerate() {
                let byte = self.codes[row * bytes + column / 2];
                let half = if column.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
                into[index / 2] |= if index.is_multiple_of(2) { half << 4 } else { half };
            }
        }
        let (first, end) = (self.first + columns.start, self.first + columns.end);
        let groups = first / self.group..end.div_ceil(self.group).max(first / self.group);
        let own = |row: usize| row * self.groups + groups.start..row * self.groups + groups.end;
        Self {
            codes,
            columns: columns.len(),
            zeros: rows.clone().flat_map(|row| &self.zeros[own(row)]).copied().collect(),
            scales: rows.flat_map(|row| &self.scales[own(row)]).copied().collect(),
            groups: groups.len(),
            group: self.group,
            first: first % self.group,
        }
    }

    /// Returns the rows with these indices.
    pub(super) fn gathered(&self, rows: &[usize]) -> Self {
        let (bytes, groups) = (self.columns.div_ceil(2), self.groups);
        Self {
            codes: rows.iter().flat_map(|row| &self.codes[row * bytes..][..bytes]).copied().collect(),
            zeros: rows.iter().flat_map(|row| &self.zeros[row * groups..][..groups]).copied().collect(),
            scales: rows.iter().flat_map(|row| &self.scales[row * groups..][..groups]).copied().collect(),
            ..*self
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.codes.len() + self.zeros.len() + 4 * self.scales.len()
    }

    pub(super) fn addresses(&self) -> Vec<usize> {
        vec![self.codes.as_ptr().addr(), self.zeros.as_ptr().addr(), self.scales.as_ptr().addr()]
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }
}

impl InEights for Grouped {
    const HAS_OFFSETS: bool = true;

    fn numbers(&self) -> &[f32; 16] {
        &DIFFERENCES[0]
    }

    fn is_in_runs(&self, count: usize) -> bool {
        [self.first, self.group, self.columns].iter().all(|size| size.is_multiple_of(count))
            && self.columns > 0
    }

    fn row<'a>(&'a self, row: usize, run: usize, factors: Factors<'_>) -> &'a [u8] {
        let groups = row * self.groups..(row + 1) * self.groups;
        let (zeros, scales) = (&self.zeros[groups.clone()], &self.scales[groups]);
        let blocks = BlocksOfRuns { size: self.group / run, skipped: self.first / run };
        eights::spread(scales, blocks, factors.scales);
        blocks.spread(|group| -f32::from(zeros[group]) * scales[group], factors.offsets);
        let bytes = self.columns / 2;
        &self.codes[row * bytes..][..bytes]
    }
}
