//! Four bits for each element, which choose one of sixteen numbers: NF4 and FP4 of bitsandbytes, and MXFP4.
//!
//! Elements are counted through the rows. Element `i` is half of byte `i / 2`: the upper half if `i` is even.
//! It means `table[half] * scale`, with one scale for each block of elements. The scales are numbers, or with
//! double quantisation (Dettmers et al., 2023, <https://arxiv.org/abs/2305.14314>) a byte for each, which means
//! `map[byte] * scale_of_scales + offset`. The scales of MXFP4 are powers of two (Open Compute Project, 2023, OCP
//! Microscaling Formats Specification 1.0, E2M1 and E8M0).

use std::ops::Range;

use multiversion::multiversion;

use super::decoded::Decoded;
use super::eights::{self, BlocksOfRuns, Factors, InEights};
use super::error::{CodebookError, CutError};
#[cfg(target_arch = "x86_64")]
use super::lookup::{Available, Lengths};

/// The elements of a matrix as four bits each.
#[derive(Clone, Debug, PartialEq)]
pub struct Codebook {
    codes: Vec<u8>,
    table: [f32; 16],
    scales: Scales,
    /// The elements of a block.
    block: usize,
    /// The columns of the matrix.
    columns: usize,
    /// Where the matrix is in the one whose elements the blocks count.
    place: Place,
}

/// A place of a part in a whole matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Place {
    /// The index of the first element.
    first: usize,
    /// The columns of the whole matrix.
    stride: usize,
    /// The block of the first scale.
    first_block: usize,
}

/// The scales of the blocks.
#[derive(Clone, Debug, PartialEq)]
pub enum Scales {
    /// A number for each block.
    Single(Vec<f32>),
    /// A byte for each block.
    Double(DoubleScales),
    /// A byte for each block, which is the exponent of a power of two, plus 127.
    Exponents(Vec<u8>),
}

/// Scales that are quantised themselves.
#[derive(Clone, Debug, PartialEq)]
pub struct DoubleScales {
    /// The byte of each block.
    pub codes: Vec<u8>,
    /// The number that each byte means, before it is scaled.
    pub map: Box<[f32; 256]>,
    /// The scale of each block of bytes.
    pub scales: Vec<f32>,
    /// The bytes of a block.
    pub block: usize,
    /// The summand of each scale.
    pub offset: f32,
    /// The bytes of the first block that are left out.
    pub first: usize,
}

impl Scales {
    /// Returns the scale of a block.
    #[inline(always)]
    pub(super) fn get(&self, block: usize) -> f32 {
        match self {
            Self::Single(scales) => scales[block],
            Self::Double(double) => double.get(block),
            Self::Exponents(exponents) => power_of_two(exponents[block]),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Single(scales) => scales.len(),
            Self::Double(double) => double.codes.len(),
            Self::Exponents(exponents) => exponents.len(),
        }
    }

    /// Writes the scale of each run of elements, from the block `first` on.
    fn spread(&self, first: usize, blocks: BlocksOfRuns, out: &mut [f32]) {
        match self {
            Self::Single(scales) => eights::spread(&scales[first..], blocks, out),
            Self::Double(double) => double.spread(first, blocks, out),
            Self::Exponents(exponents) => {
                blocks.spread(|block| power_of_two(exponents[first + block]), out);
            }
        }
    }

    /// Returns the scales of a range of blocks.
    fn part(&self, blocks: Range<usize>) -> Self {
        match self {
            Self::Single(scales) => Self::Single(scales[blocks].to_vec()),
            Self::Double(double) => {
                let first = double.first + blocks.start;
                let scales = first / double.block..(double.first + blocks.end).div_ceil(double.block);
                Self::Double(DoubleScales {
                    codes: double.codes[blocks].to_vec(),
                    scales: double.scales[scales].to_vec(),
                    first: first % double.block,
                    ..double.clone()
                })
            }
            Self::Exponents(exponents) => Self::Exponents(exponents[blocks].to_vec()),
        }
    }

    /// Returns the scales of some blocks. Scales that are quantised become numbers with the same bits.
    fn chosen(&self, blocks: impl Iterator<Item = usize>) -> Self {
        match self {
            Self::Exponents(exponents) => Self::Exponents(blocks.map(|block| exponents[block]).collect()),
            _ => Self::Single(blocks.map(|block| self.get(block)).collect()),
        }
    }

    fn addresses(&self) -> Vec<usize> {
        match self {
            Self::Single(scales) => vec![scales.as_ptr().addr()],
            Self::Double(double) => {
                let map: *const [f32; 256] = &raw const *double.map;
                vec![double.codes.as_ptr().addr(), double.scales.as_ptr().addr(), map.addr()]
            }
            Self::Exponents(exponents) => vec![exponents.as_ptr().addr()],
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Single(scales) => 4 * scales.len(),
            Self::Double(double) => double.codes.len() + 4 * (double.scales.len() + double.map.len()),
            Self::Exponents(exponents) => exponents.len(),
        }
    }
}

/// Returns a power of two. The largest exponent means a number that is not finite.
#[inline(always)]
fn power_of_two(exponent: u8) -> f32 {
    // The smallest one is below the normal numbers.
    f32::from_bits(if exponent == 0 { 1 << 22 } else { u32::from(exponent) << 23 })
}

/// Writes `map[code] * scale + offset` for each run of elements of the blocks of `codes`.
#[multiversion(targets = "simd")]
fn spread_codes(
    codes: &[u8],
    map: &[f32; 256],
    [scale, offset]: [f32; 2],
    blocks: BlocksOfRuns,
    out: &mut [f32],
) {
    let factor_of = |code: u8| map[usize::from(code)] * scale + offset;
    if blocks.size == 1 {
        return out.iter_mut().zip(codes).for_each(|(to, &code)| *to = factor_of(code));
    }
    blocks.spread(|block| factor_of(codes[block]), out);
}

impl DoubleScales {
    #[inline(always)]
    fn get(&self, block: usize) -> f32 {
        let scale = self.scales[(self.first + block) / self.block];
        self.map[usize::from(self.codes[block])] * scale + self.offset
    }

    /// Writes the scale of each run of elements, from the block `first` on, with the bits of [`DoubleScales::get`].
    fn spread(&self, first: usize, mut blocks: BlocksOfRuns, mut out: &mut [f32]) {
        let (mut first, mut of_scales) = (first, (self.first + first) / self.block);
        while !out.is_empty() {
            // The blocks whose scales have the same scale.
            let count = (of_scales + 1) * self.block - self.first - first;
            let (own, rest) = out.split_at_mut(blocks.runs(count).min(out.len()));
            let numbers = [self.scales[of_scales], self.offset];
            spread_codes(&self.codes[first..], &self.map, numbers, blocks, own);
            (out, first, of_scales) = (rest, first + count, of_scales + 1);
            blocks.skipped = 0;
        }
    }

    fn check(&self) -> Result<(), CodebookError> {
        if self.block == 0 {
            return Err(CodebookError::Block);
        }
        let needed = (self.first + self.codes.len()).div_ceil(self.block);
        if self.scales.len() != needed {
            return Err(CodebookError::ScalesOfScales { needed });
        }
        let numbers = self.map.iter().chain(&self.scales).chain([&self.offset]);
        if numbers.copied().all(f32::is_finite) { Ok(()) } else { Err(CodebookError::NotFinite) }
    }
}

/// The most blocks of a row for which rows are decoded together.
#[cfg(target_arch = "x86_64")]
const MOST_PARTS: usize = 4;

impl Codebook {
    /// Returns the elements of a matrix of `rows` and `columns`, in blocks of `block` elements.
    ///
    /// # Errors
    /// When a part has another length than the elements need, or a number is not finite.
    pub fn new(
        [rows, columns]: [usize; 2],
        codes: Vec<u8>,
        table: [f32; 16],
        scales: Scales,
        block: usize,
    ) -> Result<Self, CodebookError> {
        if block == 0 {
            return Err(CodebookError::Block);
        }
        let elements = rows.saturating_mul(columns);
        if codes.len() != elements.div_ceil(2) {
            return Err(CodebookError::Codes { needed: elements.div_ceil(2) });
        }
        if scales.len() != elements.div_ceil(block) {
            return Err(CodebookError::Scales { needed: elements.div_ceil(block) });
        }
        let are_finite = table.iter().copied().all(f32::is_finite);
        match &scales {
            Scales::Double(double) => double.check()?,
            Scales::Single(scales) if scales.iter().copied().all(f32::is_finite) => {}
            Scales::Single(_) => return Err(CodebookError::NotFinite),
            Scales::Exponents(_) => {}
        }
        // The numbers may be finite and their products not.
        let largest = table.iter().fold(0.0f32, |largest, number| largest.max(number.abs()));
        let are_products_finite = (0..scales.len()).all(|block| (largest * scales.get(block)).is_finite());
        if !are_finite || !are_products_finite {
            return Err(CodebookError::NotFinite);
        }
        let place = Place { first: 0, stride: columns, first_block: 0 };
        Ok(Self { codes, table, scales, block, columns, place })
    }

    /// Writes the elements `columns` of a row.
    pub(super) fn decode<T: Decoded>(&self, row: usize, columns: Range<usize>, out: &mut [T]) {
        assert!(columns.end <= self.columns && out.len() == columns.len(), "the row has these elements");
        if out.is_empty() {
            return;
        }
        let first = row * self.columns + columns.start;
        let element = self.place.first + row * self.place.stride + columns.start;
        let block = element / self.block;
        // The elements up to the end of the first block.
        let length = (block + 1) * self.block - element;
        let scale_of = |index: usize| self.scales.get(block - self.place.first_block + index);
        #[cfg(target_arch = "x86_64")]
        if (first | length | self.block).is_multiple_of(2)
            && let Some(available) = Available::detect()
        {
            let bytes = &self.codes[first / 2..(first + out.len()).div_ceil(2)];
            let lengths = Lengths { first: length, others: self.block };
            return T::look_up_blocks(available, bytes, &self.table, scale_of, lengths, out);
        }
        let head = length.min(out.len());
        let (own, rest) = out.split_at_mut(head);
        self.decode_block(first, scale_of(0), own);
        for (index, own) in rest.chunks_mut(self.block).enumerate() {
            self.decode_block(first + head + index * self.block, scale_of(index + 1), own);
        }
    }

    /// Writes the elements `columns` of neighbouring rows if these are a part of one block of each row, or whole blocks, and
    /// returns whether they are.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn decode_parts<T: Decoded>(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        out: &mut [T],
    ) -> bool {
        let Place { first, stride, first_block } = self.place;
        let (start, width) = (first + columns.start, columns.len());
        let (is_inside, is_whole) = (
            start % self.block + width <= self.block,
            start.is_multiple_of(self.block) && width.is_multiple_of(self.block),
        );
        let parts = if is_inside { 1 } else { (width / self.block).max(1) };
        let is_aligned = stride.is_multiple_of(self.block)
            && [columns.start, self.columns, width / parts].iter().all(|size| size.is_multiple_of(2));
        let is_possible = (is_inside || is_whole) && is_aligned && width > 0 && parts <= MOST_PARTS;
        let Some(available) = Available::detect().filter(|_| is_possible) else { return false };
        let (bytes, blocks) = (width / parts / 2, stride / self.block);
        let mut part = 0;
        let mut of_row = (rows.start * self.columns + columns.start) / 2;
        let mut block_of_row = start / self.block + rows.start * blocks - first_block;
        let next = || {
            let codes = &self.codes[of_row + part * bytes..][..bytes];
            let scale = self.scales.get(block_of_row + part);
            part += 1;
            if part == parts {
                (part, of_row, block_of_row) = (0, of_row + self.columns / 2, block_of_row + blocks);
            }
            (codes, scale)
        };
        T::look_up_parts(available, &self.table, next, width / parts, out);
        true
    }

    /// Writes elements of one block, from the element `first` of this matrix on.
    fn decode_block<T: Decoded>(&self, first: usize, scale: f32, out: &mut [T]) {
        let bytes = &self.codes[first / 2..(first + out.len()).div_ceil(2)];
        let scaled = self.table.map(|number| T::rounded(number * scale));
        for (index, to) in (first % 2..).zip(out) {
            let byte = bytes[index / 2];
            *to = scaled[usize::from(if index.is_multiple_of(2) { byte >> 4 } else { byte & 15 })];
        }
    }

    /// Returns the rows and columns of a part of a matrix of `rows` rows.
    pub(super) fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let Place { first, stride, first_block } = self.place;
        let first = first + rows.start * stride + columns.start;
        let end = if rows.is_empty() || columns.is_empty() {
            first
        } else {
            first + (rows.len() - 1) * stride + columns.len()
        };
        let blocks = first / self.block..end.div_ceil(self.block);
        let mut codes = vec![0; (rows.len() * columns.len()).div_ceil(2)];
        let halves = rows.flat_map(|row| columns.clone().map(move |column| row * self.columns + column));
        for (index, from) in halves.enumerate() {
            let byte = self.codes[from / 2];
            let half = if from.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
            codes[index / 2] |= if index.is_multiple_of(2) { half << 4 } else { half };
        }
        let scales = self.scales.part(blocks.start - first_block..blocks.end - first_block);
        let place = Place { first, stride, first_block: blocks.start };
        Self { codes, scales, columns: columns.len(), place, ..*self }.without_other_scales()
    }

    /// Returns the same elements without the scales of other blocks, if the scales are not quantised further and no block has
    /// elements of two rows.
    fn without_other_scales(self) -> Self {
        let Place { first, stride, first_block } = self.place;
        if matches!(self.scales, Scales::Double(_)) {
            return self;
        }
        let is_aligned = [first, stride, self.columns].iter().all(|size| size.is_multiple_of(self.block));
        if !is_aligned || self.columns == stride || self.columns == 0 {
            return self;
        }
        let (blocks, all, start) =
            (self.columns / self.block, stride / self.block, first / self.block - first_block);
        let own = (start..self.scales.len()).step_by(all).flat_map(|row| row..row + blocks);
        let scales = self.scales.chosen(own);
        let place = Place { first: 0, stride: self.columns, first_block: 0 };
        Self { scales, place, ..self }
    }

    /// Returns the rows with these indices. Scales that are quantised become numbers with the same bits.
    pub(super) fn gathered(&self, rows: &[usize]) -> Result<Self, CutError> {
        let Place { first, stride, first_block } = self.place;
        let is_aligned = [first, stride, self.columns].iter().all(|size| size.is_multiple_of(self.block));
        if !is_aligned || !self.columns.is_multiple_of(2) {
            return Err(CutError { column: self.columns, block: self.block });
        }
        let (bytes, blocks) = (self.columns / 2, self.columns / self.block);
        let codes = rows.iter().flat_map(|row| &self.codes[row * bytes..][..bytes]).copied().collect();
        let first_of = |&row: &usize| (first + row * stride) / self.block - first_block;
        let scales = self.scales.chosen(rows.iter().map(first_of).flat_map(|first| first..first + blocks));
        let place = Place { first: 0, stride: self.columns, first_block: 0 };
        Ok(Self { codes, scales, place, ..*self })
    }

    /// Returns the bytes of the elements: a half for each, the upper one first.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Returns the scales of the blocks.
    pub fn scales(&self) -> &Scales {
        &self.scales
    }

    pub(super) fn bytes(&self) -> usize {
        self.codes.len() + self.scales.bytes()
    }

    pub(super) fn addresses(&self) -> Vec<usize> {
        let mut addresses = self.scales.addresses();
        addresses.push(self.codes.as_ptr().addr());
        addresses
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }
}

impl InEights for Codebook {
    const HAS_OFFSETS: bool = false;

    fn numbers(&self) -> &[f32; 16] {
        &self.table
    }

    fn is_in_runs(&self, count: usize) -> bool {
        let Place { first, stride, .. } = self.place;
        [first, stride, self.block, self.columns].iter().all(|size| size.is_multiple_of(count))
            && self.columns > 0
    }

    fn row<'a>(&'a self, row: usize, run: usize, factors: Factors<'_>) -> &'a [u8] {
        let element = self.place.first + row * self.place.stride;
        let block = element / self.block;
        let skipped = (element - block * self.block) / run;
        let blocks = BlocksOfRuns { size: self.block / run, skipped };
        self.scales.spread(block - self.place.first_block, blocks, factors.scales);
        let bytes = self.columns / 2;
        &self.codes[row * bytes..][..bytes]
    }
}
