//! One tile of a result with AVX512-BF16: the sums of up to 14 rows and 32 columns, which stay in registers.

use std::arch::x86_64::*;

use half::bf16;

use super::pack::low_bits;
use crate::product::{LineRequests, prefetch};

/// Rows of a panel of the left operand: 28 registers of sums, 2 of the right operand and 1 of the left.
pub(super) const ROWS: usize = 14;
/// Columns of a panel of the right operand: two registers of sums.
pub(super) const COLUMNS: usize = 32;

/// Where the elements of a result go, in row-major order.
#[derive(Clone, Copy)]
pub(super) enum Output {
    /// Rounded to the closest number; ties go to the even one.
    Rounded(*mut bf16),
    Single(*mut f32),
    /// Added to the existing elements.
    Added(*mut f32),
}

impl Output {
    /// Returns the output from the element `offset` on, which may be outside the result.
    pub(super) fn at(self, offset: usize) -> Self {
        match self {
            Self::Rounded(start) => Self::Rounded(start.wrapping_add(offset)),
            Self::Single(start) => Self::Single(start.wrapping_add(offset)),
            Self::Added(start) => Self::Added(start.wrapping_add(offset)),
        }
    }

    /// Returns a request for rows of the output, in `steps` steps. `runs` has the number of rows, their length and the distance
    /// between two.
    pub(super) fn request(self, runs: [usize; 3], steps: usize) -> LineRequests {
        match self {
            Self::Rounded(start) => LineRequests::new(start, runs, [0, 1], steps),
            Self::Single(start) | Self::Added(start) => LineRequests::new(start, runs, [0, 1], steps),
        }
    }
}

/// A product in single precision with a short inner dimension, which is added to the sums of a tile before they
/// are rounded.
#[derive(Clone, Copy)]
pub(super) struct Update {
    /// The inner dimension.
    pub(super) rank: usize,
    /// Rows of `rank` elements.
    pub(super) left: *const f32,
    /// The first column of `rank` rows.
    pub(super) right: *const f32,
    /// The distance between two rows of `right`.
    pub(super) stride: usize,
}

impl Update {
    /// Returns the update of the tiles that begin at a row and a column of the result.
    pub(super) fn at(self, row: usize, column: usize) -> Self {
        let Self { rank, left, right, stride } = self;
        Self { rank, left: left.wrapping_add(row * rank), right: right.wrapping_add(column), stride }
    }
}

/// A tile and its packed operands.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Pairs of the inner dimension.
    pub(super) pairs: usize,
    /// `rows` words for each pair, or the tiles of AMX.
    pub(super) left: *const u32,
    /// [`COLUMNS`] words for each pair.
    pub(super) right: *const u32,
    /// The tile's first element.
    pub(super) output: Output,
    /// The distance between two rows of the output.
    pub(super) stride: usize,
    /// From 1 to [`ROWS`], or to the rows of a panel of AMX.
    pub(super) rows: usize,
    /// From 1 to [`COLUMNS`].
    pub(super) columns: usize,
    pub(super) update: Option<Update>,
    /// Memory that is used later.
    pub(super) requests: [LineRequests; 2],
}

impl Tile {
    /// Computes the tile.
    ///
    /// # Safety
    /// The operands must have as many words as their fields say. Rows and columns of the output must be
    /// memory that nothing else uses; if they are added to, they must be initialised.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(super) unsafe fn compute(self) {
        // SAFETY: as the caller says, with the number of rows as a constant.
        unsafe {
            match self.rows {
                1 => self.compute_rows::<1>(),
                2 => self.compute_rows::<2>(),
                3 => self.compute_rows::<3>(),
                4 => self.compute_rows::<4>(),
                5 => self.compute_rows::<5>(),
                6 => self.compute_rows::<6>(),
                7 => self.compute_rows::<7>(),
                8 => self.compute_rows::<8>(),
                9 => self.compute_rows::<9>(),
                10 => self.compute_rows::<10>(),
                11 => self.compute_rows::<11>(),
                12 => self.compute_rows::<12>(),
                13 => self.compute_rows::<13>(),
                _ => self.compute_rows::<ROWS>(),
            }
        }
    }

    /// # Safety
    /// As [`Tile::compute`], for a tile of `N` rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn compute_rows<const N: usize>(self) {
        if let Output::Added(start) = self.output {
            // The elements are in the cache when the sums are complete.
            for row in 0..N {
                for half in 0..2 {
                    prefetch(start.wrapping_add(row * self.stride + half * COLUMNS / 2));
                }
            }
        }
        let mut sums = [[_mm512_setzero_ps(); 2]; N];
        let (mut left, mut right, mut requests) = (self.left, self.right, self.requests);
        for _ in 0..self.pairs {
            LineRequests::step_all(&mut requests);
            // Without closures: builds without optimisation at link time do not inline functions of the
            // standard library that call them.
            // SAFETY: both operands have words for this pair. The two types of registers have the same bits.
            unsafe {
                let low = std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(right.cast()));
                let high = _mm512_loadu_si512(right.add(COLUMNS / 2).cast());
                let high = std::mem::transmute::<__m512i, __m512bh>(high);
                for (row, [low_sum, high_sum]) in sums.iter_mut().enumerate() {
                    let pair = _mm512_set1_epi32(left.add(row).read().cast_signed());
                    let pair = std::mem::transmute::<__m512i, __m512bh>(pair);
                    *low_sum = _mm512_dpbf16_ps(*low_sum, pair, low);
                    *high_sum = _mm512_dpbf16_ps(*high_sum, pair, high);
                }
                (left, right) = (left.add(N), right.add(COLUMNS));
            }
        }
        // SAFETY: as the caller says.
        unsafe { self.finish(sums) };
    }

    /// Adds the update, and writes `N` rows of the output.
    ///
    /// # Safety
    /// As [`Tile::compute`], for a tile of `N` rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(super) unsafe fn finish<const N: usize>(self, mut sums: [[__m512; 2]; N]) {
        if let Some(update) = self.update {
            let mask = low_bits(self.columns);
            for inner in 0..update.rank {
                let right = update.right.wrapping_add(inner * update.stride);
                // SAFETY: the mask ends at the last column, and masked elements are not accessed. The left
                // operand has a row for each of the tile's.
                unsafe {
                    let low = _mm512_maskz_loadu_ps(mask as __mmask16, right);
                    let high = right.wrapping_add(COLUMNS / 2);
                    let high = _mm512_maskz_loadu_ps((mask >> 16) as __mmask16, high);
                    for (row, [low_sum, high_sum]) in sums.iter_mut().enumerate() {
                        let element = _mm512_set1_ps(update.left.add(row * update.rank + inner).read());
                        *low_sum = _mm512_fmadd_ps(element, low, *low_sum);
                        *high_sum = _mm512_fmadd_ps(element, high, *high_sum);
                    }
                }
            }
        }
        // SAFETY: as the caller says.
        unsafe { self.write(sums) };
    }

    /// # Safety
    /// As [`Tile::compute`], for a tile of `N` rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn write<const N: usize>(self, sums: [[__m512; 2]; N]) {
        let mask = low_bits(self.columns);
        let masks = [mask as __mmask16, (mask >> 16) as __mmask16];
        for (row, sums) in sums.into_iter().enumerate() {
            for (half, (sum, mask)) in sums.into_iter().zip(masks).enumerate() {
                let offset = row * self.stride + half * COLUMNS / 2;
                // SAFETY: the mask ends at the last column, and masked elements are not accessed; without a
                // column none is, so the pointer may be beyond the row.
                unsafe {
                    match self.output {
                        Output::Rounded(start) => {
                            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(sum));
                            _mm256_mask_storeu_epi16(start.wrapping_add(offset).cast(), mask, rounded);
                        }
                        Output::Single(start) => {
                            _mm512_mask_storeu_ps(start.wrapping_add(offset), mask, sum);
                        }
                        Output::Added(start) => {
                            let start = start.wrapping_add(offset);
                            let added = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, start), sum);
                            _mm512_mask_storeu_ps(start, mask, added);
                        }
                    }
                }
            }
        }
    }
}
