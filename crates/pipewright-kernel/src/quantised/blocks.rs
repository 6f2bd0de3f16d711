//! Elements in blocks that have their codes and scales together ([`BlockKind`]).

use std::ops::Range;

use half::f16;
use multiversion::multiversion;

use super::block_kind::{BlockKind, UNIT};
use super::decoded::Decoded;
use super::error::CodebookError;
#[cfg(target_arch = "x86_64")]
use super::{
    lookup::Available,
    wide_blocks::{self, ROWS, STEP},
};

/// The elements that are decoded at a time, whole units and whole steps.
const ROOM: usize = 256;

/// The elements of a matrix in blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Blocks {
    kind: BlockKind,
    bytes: Vec<u8>,
    columns: usize,
    /// The blocks of a row.
    blocks: usize,
    /// The place of the first column in its block.
    first: usize,
}

impl Blocks {
    /// Returns the elements of a matrix of `rows` and `columns`.
    ///
    /// # Errors
    /// When the rows do not consist of whole blocks, there are other than the needed bytes, or a scale is not finite.
    pub fn new(kind: BlockKind, [rows, columns]: [usize; 2], bytes: Vec<u8>) -> Result<Self, CodebookError> {
        if !columns.is_multiple_of(kind.elements()) {
            return Err(CodebookError::Columns { block: kind.elements() });
        }
        let blocks = columns / kind.elements();
        let needed = rows.saturating_mul(blocks).saturating_mul(kind.bytes());
        if bytes.len() != needed {
            return Err(CodebookError::Codes { needed });
        }
        let is_finite = |block: &[u8]| kind.halves().iter().all(|&place| half_at(block, place).is_finite());
        if !bytes.chunks_exact(kind.bytes()).all(is_finite) {
            return Err(CodebookError::NotFinite);
        }
        Ok(Self { kind, bytes, columns, blocks, first: 0 })
    }

    /// Returns the form of the blocks.
    pub fn kind(&self) -> BlockKind {
        self.kind
    }

    fn row_bytes(&self) -> usize {
        self.blocks * self.kind.bytes()
    }

    /// Writes the elements `columns` of a row.
    pub(super) fn decode<T: Decoded>(&self, row: usize, columns: Range<usize>, mut out: &mut [T]) {
        assert!(columns.end <= self.columns && out.len() == columns.len(), "the row has these elements");
        let bytes = self.row(row);
        let (mut column, end) = (self.first + columns.start, self.first + columns.end);
        #[cfg(target_arch = "x86_64")]
        let available = self.wide();
        #[cfg(target_arch = "x86_64")]
        let size = if available.is_some() { STEP } else { UNIT };
        #[cfg(not(target_arch = "x86_64"))]
        let size = UNIT;
        let mut room = [0.0; ROOM];
        while column < end {
            let start = column - column % size;
            let room = &mut room[..(end.next_multiple_of(size) - start).min(ROOM)];
            #[cfg(target_arch = "x86_64")]
            match available {
                Some(available) => wide_blocks::decode(available, self.kind, bytes, start, room),
                None => decode_units(self.kind, bytes, start / UNIT, room),
            }
            #[cfg(not(target_arch = "x86_64"))]
            decode_units(self.kind, bytes, start / UNIT, room);
            let room = &room[column - start..];
            let (own, rest) = out.split_at_mut(room.len().min(end - column));
            T::round_all(&room[..own.len()], own);
            column += own.len();
            out = rest;
        }
    }

    /// Returns the instructions that decode whole steps of a row, if the rows have these.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn wide(&self) -> Option<Available> {
        let is_whole = (self.blocks * self.kind.elements()).is_multiple_of(STEP);
        Available::detect().filter(|_| is_whole)
    }

    /// Computes the products of the rows from `first` on with a row of numbers, in parts of `part` elements, of whole blocks.
    /// The rows begin with a block.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn products(
        &self,
        available: Available,
        first: usize,
        x: &[f32],
        part: usize,
        out: &mut [f32],
    ) {
        assert!(self.first == 0 && x.len() == self.columns, "the rows have these elements");
        for (index, out) in out.chunks_mut(ROWS).enumerate() {
            // Rows after the last one repeat it.
            let rows = std::array::from_fn(|row| self.row(first + index * ROWS + row.min(out.len() - 1)));
            let found = wide_blocks::products(available, self.kind, rows, x, part);
            out.copy_from_slice(&found[..out.len()]);
        }
    }

    /// Returns whether the first column begins a block, and the last one ends one.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_whole(&self) -> bool {
        self.first == 0 && self.columns == self.blocks * self.kind.elements()
    }

    fn row(&self, row: usize) -> &[u8] {
        &self.bytes[row * self.row_bytes()..][..self.row_bytes()]
    }

    /// Returns the rows and columns of a part, with the whole blocks that have them.
    pub(super) fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let (size, bytes) = (self.kind.elements(), self.kind.bytes());
        let (first, end) = (self.first + columns.start, self.first + columns.end);
        let blocks = first / size..end.div_ceil(size).max(first / size);
        let own = |row: usize| &self.row(row)[blocks.start * bytes..blocks.end * bytes];
        Self {
            bytes: rows.flat_map(own).copied().collect(),
            columns: columns.len(),
            blocks: blocks.len(),
            first: first % size,
            ..*self
        }
    }

    /// Returns the rows with these indices.
    pub(super) fn gathered(&self, rows: &[usize]) -> Self {
        Self { bytes: rows.iter().flat_map(|row| self.row(*row)).copied().collect(), ..*self }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the blocks as files have them.
    pub fn storage(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }
}

/// Returns the number of half precision at a place of a block.
#[inline(always)]
fn half_at(block: &[u8], place: usize) -> f32 {
    f16::from_le_bytes([block[place], block[place + 1]]).to_f32()
}

/// Decodes neighbouring units of a row, from `unit` on.
#[multiversion(targets = "simd")]
fn decode_units(kind: BlockKind, row: &[u8], unit: usize, out: &mut [f32]) {
    let in_block = kind.elements() / UNIT;
    for (index, out) in (unit..).zip(out.as_chunks_mut::<UNIT>().0) {
        let block = &row[index / in_block * kind.bytes()..][..kind.bytes()];
        match kind {
            BlockKind::Q4_0 => halves(&block[2..], [0; 4], half_at(block, 0), 8, None, out),
            BlockKind::Q4_1 => {
                halves(&block[4..], [0; 4], half_at(block, 0), 0, Some(half_at(block, 2)), out);
            }
            BlockKind::Q5_0 => halves(&block[6..], fifth_bits(&block[2..]), half_at(block, 0), 16, None, out),
            BlockKind::Q5_1 => {
                let (scale, least) = (half_at(block, 0), half_at(block, 2));
                halves(&block[8..], fifth_bits(&block[4..]), scale, 0, Some(least), out);
            }
            BlockKind::Q8_0 => {
                let scale = half_at(block, 0);
                for (to, &code) in out.iter_mut().zip(&block[2..]) {
                    *to = f32::from(code as i8) * scale;
                }
            }
            BlockKind::Q4K => four_or_five(block, None, &block[16..], index % in_block, out),
            BlockKind::Q5K => four_or_five(block, Some(&block[16..48]), &block[48..], index % in_block, out),
            BlockKind::Q6K => six(block, index % in_block, out),
        }
    }
}

/// Returns the fifth bits of 32 codes.
#[inline(always)]
fn fifth_bits(bytes: &[u8]) -> [u8; 4] {
    [bytes[0], bytes[1], bytes[2], bytes[3]]
}

/// Decodes codes whose lower halves of 16 bytes come first.
#[inline(always)]
fn halves(codes: &[u8], fifth: [u8; 4], scale: f32, zero: i32, least: Option<f32>, out: &mut [f32; UNIT]) {
    let fifth = u32::from_le_bytes(fifth);
    for (index, to) in out.iter_mut().enumerate() {
        let code = if index < 16 { codes[index] & 15 } else { codes[index - 16] >> 4 };
        let code = i32::from(code) | (((fifth >> index) & 1) << 4) as i32;
        let scaled = scale * (code - zero) as f32;
        *to = least.map_or(scaled, |least| scaled + least);
    }
}

/// Returns the scale and the least number of a unit of 32 elements, from the 12 bytes of scales of a block.
#[inline(always)]
fn scales_of(scales: &[u8], unit: usize) -> [u8; 2] {
    if unit < 4 {
        [scales[unit] & 63, scales[unit + 4] & 63]
    } else {
        let both = scales[unit + 4];
        [both & 15 | (scales[unit - 4] >> 6) << 4, both >> 4 | (scales[unit] >> 6) << 4]
    }
}

/// Decodes a unit of Q4_K or, with fifth bits, Q5_K.
#[inline(always)]
fn four_or_five(block: &[u8], fifth: Option<&[u8]>, codes: &[u8], unit: usize, out: &mut [f32; UNIT]) {
    let [scale, least] = scales_of(&block[4..16], unit);
    let (scale, least) = (half_at(block, 0) * f32::from(scale), half_at(block, 2) * f32::from(least));
    let (codes, shift) = (&codes[unit / 2 * UNIT..][..UNIT], unit % 2 * 4);
    for (index, (to, &byte)) in out.iter_mut().zip(codes).enumerate() {
        let upper = fifth.map_or(0, |fifth| ((fifth[index] >> unit) & 1) << 4);
        *to = scale * f32::from((byte >> shift) & 15 | upper) - least;
    }
}

/// Decodes a unit of Q6_K.
#[inline(always)]
fn six(block: &[u8], unit: usize, out: &mut [f32; UNIT]) {
    let (half, quarter) = (unit / 4, unit % 4);
    let lower = &block[half * 64 + quarter % 2 * UNIT..][..UNIT];
    let upper = &block[128 + half * UNIT..][..UNIT];
    let scale = half_at(block, 208);
    let scales = [0, 1].map(|index| scale * f32::from(block[192 + unit * 2 + index] as i8));
    for (index, (to, (&lower, &upper))) in out.iter_mut().zip(lower.iter().zip(upper)).enumerate() {
        let code = (lower >> (quarter / 2 * 4)) & 15 | ((upper >> (quarter * 2)) & 3) << 4;
        *to = scales[index / 16] * f32::from(code as i8 - 32);
    }
}
