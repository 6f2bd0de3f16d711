//! Packs the operands of a product: pairs of neighbouring elements of the inner dimension, as words.

use std::arch::x86_64::*;

use half::bf16;

use crate::product::Matrix;

/// Lanes of a register: vectors that are packed at once.
const LANES: usize = 16;

/// Elements of a cache line.
const LINE: usize = 64 / size_of::<bf16>();

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
        let are_neighbours = self.depth_stride != 1;
        let lanes = if are_neighbours { 2 * LANES } else { LANES };
        for lane in (0..width).step_by(lanes) {
            let strip = Strip {
                first: first + lane,
                present: self.count.saturating_sub(first + lane).min(lanes).min(width - lane),
                stored: low_bits((width - lane).min(lanes)),
                width,
            };
            // SAFETY: the strip ends at the width, and the caller gives memory for this width.
            unsafe {
                if are_neighbours {
                    self.pack_interleaved(strip, into.add(lane));
                } else {
                    self.pack_transposed(strip, into.add(lane));
                }
            }
        }
    }

    /// Asks for a part of the memory of `count` vectors from `first` on in the second-level cache: the part
    /// `part` of `parts`.
    pub(super) fn prefetch(self, first: usize, count: usize, part: usize, parts: usize) {
        let count = count.min(self.count.saturating_sub(first));
        // Runs of neighbouring elements.
        let (runs, length, distance, start) = if self.depth_stride == 1 {
            (count, self.depth, self.stride, first * self.stride)
        } else {
            (self.depth, count, self.depth_stride, first)
        };
        for run in runs * part / parts..runs * (part + 1) / parts {
            for element in (0..length).step_by(LINE) {
                let at = self.data.as_ptr().wrapping_add(start + run * distance + element);
                // SAFETY: each processor has the instruction, and it may be given any address.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
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
                let stored = strip.stored as __mmask16;
                // SAFETY: the pair is one of the vector's, and the mask ends at the strip's last word.
                unsafe { _mm512_mask_storeu_epi32(into.add(pair * strip.width).cast(), stored, words) };
            }
        }
    }

    /// Packs neighbouring vectors, a cache line of each element at once.
    ///
    /// # Safety
    /// `into` must point to the strip's first word.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack_interleaved(self, strip: Strip, into: *mut u32) {
        let [low, high] = interleaving();
        let [low_stored, high_stored] = [strip.stored as __mmask16, (strip.stored >> LANES) as __mmask16];
        for pair in 0..self.pairs() {
            let (even, odd) = (self.elements(strip, 2 * pair), self.elements(strip, 2 * pair + 1));
            let into = into.wrapping_add(pair * strip.width);
            let low = _mm512_permutex2var_epi16(even, low, odd);
            let high = _mm512_permutex2var_epi16(even, high, odd);
            // SAFETY: the pair is one of the vector's, the mask ends at the strip's last word, and masked words
            // are not accessed; the pointer to masked words may be beyond the memory.
            unsafe {
                _mm512_mask_storeu_epi32(into.cast(), low_stored, low);
                _mm512_mask_storeu_epi32(into.wrapping_add(LANES).cast(), high_stored, high);
            }
        }
    }

    /// Returns an element of each vector of a strip. The element behind the last is zero.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn elements(self, strip: Strip, index: usize) -> __m512i {
        if index == self.depth {
            return _mm512_setzero_si512();
        }
        let at = index * self.depth_stride + strip.first;
        // SAFETY: the index is below the depth, the mask ends at the last vector, and masked elements are not
        // accessed; without a vector none is, so the pointer may be beyond the data.
        unsafe {
            _mm512_maskz_loadu_epi16(low_bits(strip.present), self.data.as_ptr().wrapping_add(at).cast())
        }
    }
}

/// Returns the indices that interleave the first and the second halves of two registers of elements.
#[target_feature(enable = "avx512f")]
fn interleaving() -> [__m512i; 2] {
    // A word has the element of the first register in its lower half. Indices from 32 on are of the second.
    let first = _mm512_add_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_slli_epi32::<16>(_mm512_set_epi32(
            47, 46, 45, 44, 43, 42, 41, 40, 39, 38, 37, 36, 35, 34, 33, 32,
        )),
    );
    [first, _mm512_add_epi32(first, _mm512_set1_epi32(LANES as i32 * 0x1_0001))]
}

/// Vectors of a panel: up to [`LANES`], or twice as many if they are neighbours.
#[derive(Clone, Copy)]
struct Strip {
    first: usize,
    /// The vectors that exist.
    present: usize,
    /// The words that are written for each pair.
    stored: u32,
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
