//! Packs the operands of a product: pairs of neighbouring elements of the inner dimension, as words.

use std::arch::x86_64::*;

use half::bf16;

use crate::product::Matrix;

/// Lanes of a register: vectors that are packed at once.
const LANES: usize = 16;

/// An operand as vectors along the inner dimension: the rows of a left operand, the columns of a right one.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a> {
    data: &'a [bf16],
    pub(super) count: usize,
    /// Elements of a vector.
    depth: usize,
    /// The distance between two vectors. This or the next is 1.
    stride: usize,
    /// The distance between two elements of a vector.
    depth_stride: usize,
}

impl<'a> Vectors<'a> {
    pub(super) fn columns_of(matrix: Matrix<'a, bf16>) -> Self {
        Self::rows_of(matrix.transposed())
    }

    pub(super) fn rows_of(matrix: Matrix<'a, bf16>) -> Self {
        let Matrix { data, rows, columns, row_stride, column_stride } = matrix;
        Self { data, count: rows, depth: columns, stride: row_stride, depth_stride: column_stride }
    }

    /// Returns the number of pairs of a vector's elements. Zero stands in for the second element of the last
    /// pair of an odd number of elements.
    pub(super) fn pairs(self) -> usize {
        self.depth.div_ceil(2)
    }

    /// Packs the vectors from `first` on, at most `width`: pair `p` of vector `first + v` becomes word
    /// `p * width + v`. Words without a vector are zero.
    ///
    /// # Safety
    /// `into` must point to memory for `pairs * width` words.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn pack(self, first: usize, width: usize, into: *mut u32) {
        for lane in (0..width).step_by(LANES) {
            let strip = Strip {
                first: first + lane,
                present: self.count.saturating_sub(first + lane).min(LANES).min(width - lane),
                stored: low_bits((width - lane).min(LANES)) as __mmask16,
                width,
            };
            // SAFETY: the strip ends at the width, and the caller gives memory for this width.
            unsafe {
                if self.depth_stride == 1 {
                    self.pack_transposed(strip, into.add(lane));
                } else {
                    self.pack_interleaved(strip, into.add(lane));
                }
            }
        }
    }

    /// Packs vectors whose elements are neighbours.
    ///
    /// # Safety
    /// `into` must point to the strip's first word.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack_transposed(self, strip: Strip, into: *mut u32) {
        let pairs = self.pairs();
        for start in (0..pairs).step_by(LANES) {
            let read = low_bits((self.depth - 2 * start).min(2 * LANES));
            let mut words = [_mm512_setzero_si512(); LANES];
            for (lane, words) in words.iter_mut().enumerate().take(strip.present) {
                let at = (strip.first + lane) * self.stride + 2 * start;
                // The processor does not predict accesses to so many short rows, so the next strip's are requested
                // here. The address may be beyond the data, where a prefetch has no effect.
                let next = self.data.as_ptr().wrapping_add(at + LANES * self.stride);
                _mm_prefetch::<_MM_HINT_T0>(next.cast());
                // SAFETY: the vector exists, the mask ends at its last element, and masked elements are not
                // accessed.
                *words = unsafe { _mm512_maskz_loadu_epi16(read, self.data.as_ptr().add(at).cast()) };
            }
            for (pair, words) in (start..pairs).zip(transpose(words)) {
                // SAFETY: the pair is one of the vector's, and the mask ends at the strip's last word.
                unsafe { _mm512_mask_storeu_epi32(into.add(pair * strip.width).cast(), strip.stored, words) };
            }
        }
    }

    /// Packs neighbouring vectors.
    ///
    /// # Safety
    /// `into` must point to the strip's first word.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack_interleaved(self, strip: Strip, into: *mut u32) {
        for pair in 0..self.pairs() {
            let (even, odd) = (self.elements(strip, 2 * pair), self.elements(strip, 2 * pair + 1));
            let words = _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd));
            // SAFETY: the pair is one of the vector's, and the mask ends at the strip's last word.
            unsafe { _mm512_mask_storeu_epi32(into.add(pair * strip.width).cast(), strip.stored, words) };
        }
    }

    /// Returns an element of each vector of a strip, widened to a word. The element behind the last is zero.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn elements(self, strip: Strip, index: usize) -> __m512i {
        if index == self.depth {
            return _mm512_setzero_si512();
        }
        let read = low_bits(strip.present) as __mmask16;
        let at = index * self.depth_stride + strip.first;
        // SAFETY: the index is below the depth, the mask ends at the last vector, and masked elements are not
        // accessed; without a vector none is, so the pointer may be beyond the data.
        let elements = unsafe { _mm256_maskz_loadu_epi16(read, self.data.as_ptr().wrapping_add(at).cast()) };
        _mm512_cvtepu16_epi32(elements)
    }
}

/// Up to [`LANES`] vectors of a panel.
#[derive(Clone, Copy)]
struct Strip {
    first: usize,
    /// The vectors that exist.
    present: usize,
    /// The words that are written for each pair.
    stored: __mmask16,
    /// The words of a pair in the panel.
    width: usize,
}

/// Returns a mask of the `count` lowest bits, at most 32.
pub(super) fn low_bits(count: usize) -> u32 {
    u32::MAX.checked_shr(32 - count as u32).unwrap_or(0)
}

/// Transposes a square of words: first within blocks of 4 x 4, then the blocks.
#[target_feature(enable = "avx512f")]
fn transpose(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut halves = rows;
    for (to, from) in halves.as_chunks_mut::<2>().0.iter_mut().zip(rows.as_chunks::<2>().0) {
        *to = [_mm512_unpacklo_epi32(from[0], from[1]), _mm512_unpackhi_epi32(from[0], from[1])];
    }
    let mut blocks = halves;
    for (to, from) in blocks.as_chunks_mut::<4>().0.iter_mut().zip(halves.as_chunks::<4>().0) {
        let [a, b, c, d] = *from;
        *to = [
            _mm512_unpacklo_epi64(a, c),
            _mm512_unpackhi_epi64(a, c),
            _mm512_unpacklo_epi64(b, d),
            _mm512_unpackhi_epi64(b, d),
        ];
    }
    let mut columns = blocks;
    for j in 0..4 {
        let [a, b, c, d] = [blocks[j], blocks[4 + j], blocks[8 + j], blocks[12 + j]];
        let (even, odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
        let (even_2, odd_2) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
        columns[j] = _mm512_shuffle_i32x4::<0x88>(even, even_2);
        columns[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd, odd_2);
        columns[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even, even_2);
        columns[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd, odd_2);
    }
    columns
}
