//! Packs the operands of a product: pairs of neighbouring elements of the inner dimension, as words.

use std::arch::x86_64::*;

use half::bf16;

use crate::product::{LineRequests, Matrix, transpose};

/// Lanes of a register: vectors that are packed at once.
const LANES: usize = 16;

/// An operand as vectors along the inner dimension: the rows of a left operand, the columns of a right one.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a> {
    data: &'a [bf16],
    pub(super) count: usize,
    /// Elements of a vector.
    depth: usize,
    /// Pairs of a packed vector, with zeros at the end.
    pairs: usize,
    /// The distance between two vectors. This or the next is 1.
    stride: usize,
    /// The distance between two elements of a vector.
    depth_stride: usize,
}

impl<'a> Vectors<'a> {
    pub(super) fn columns_of(matrix: Matrix<'a, bf16>, at_once: usize) -> Self {
        Self::rows_of(matrix.transposed(), at_once)
    }

    /// Returns the rows of a matrix, for an instruction that multiplies `at_once` pairs of each.
    pub(super) fn rows_of(matrix: Matrix<'a, bf16>, at_once: usize) -> Self {
        let Matrix { data, rows, columns, row_stride, column_stride } = matrix;
        let pairs = columns.div_ceil(2).next_multiple_of(at_once);
        Self { data, count: rows, depth: columns, pairs, stride: row_stride, depth_stride: column_stride }
    }

    /// Returns the number of pairs of a packed vector. Elements after the last one are zero.
    pub(super) fn pairs(self) -> usize {
        self.pairs
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

    /// Packs `count` vectors from `first` on for AMX, in tiles of [`LANES`] vectors and as many pairs: pair
    /// `16 t + p` of vector `first + v` becomes word `p` of row `v` of tile `t`. The tiles of the next 16
    /// vectors follow. Words without a vector are zero.
    ///
    /// # Safety
    /// `into` must point to memory for `pairs` words of `count` vectors, rounded up to a multiple of
    /// [`LANES`], that begins at a cache line.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn pack_tiles(self, first: usize, count: usize, mut into: *mut u32) {
        for first in (first..first + count).step_by(LANES) {
            let present = self.count.saturating_sub(first).min(LANES);
            for start in (0..self.pairs).step_by(LANES) {
                let vectors = if self.depth_stride == 1 {
                    self.vectors(first, present, start)
                } else {
                    transpose(self.pairs_of(first, present, start))
                };
                for words in vectors {
                    // SAFETY: each vector of a tile has a row of 16 words.
                    unsafe {
                        _mm512_store_si512(into.cast(), words);
                        into = into.add(LANES);
                    }
                }
            }
        }
    }

    /// Returns [`LANES`] pairs from `start` on of up to as many vectors, whose elements are neighbours: a
    /// register for each vector.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn vectors(self, first: usize, present: usize, start: usize) -> [__m512i; LANES] {
        let read = low_bits(self.depth.saturating_sub(2 * start).min(2 * LANES));
        let mut vectors = [_mm512_setzero_si512(); LANES];
        for (lane, words) in vectors.iter_mut().enumerate().take(present) {
            let at = (first + lane) * self.stride + 2 * start;
            // The processor does not predict accesses to so many short rows, so the next strip's are
            // requested here. The address may be beyond the data, where a prefetch has no effect.
            let next = self.data.as_ptr().wrapping_add(at + LANES * self.stride);
            _mm_prefetch::<_MM_HINT_T0>(next.cast());
            // SAFETY: the vector exists, the mask ends at its last element, and masked elements are not
            // accessed; without an element none is, so the pointer may be beyond the data.
            *words = unsafe { _mm512_maskz_loadu_epi16(read, self.data.as_ptr().wrapping_add(at).cast()) };
        }
        vectors
    }

    /// Like [`Vectors::vectors`], for vectors that are neighbours: returns a register for each pair.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn pairs_of(self, first: usize, present: usize, start: usize) -> [__m512i; LANES] {
        let [low, _] = interleaving();
        let strip = Strip { first, present, stored: 0, width: 0 };
        let mut pairs = [_mm512_setzero_si512(); LANES];
        for (pair, words) in (start..).zip(&mut pairs) {
            let (even, odd) = (self.elements(strip, 2 * pair), self.elements(strip, 2 * pair + 1));
            *words = _mm512_permutex2var_epi16(even, low, odd);
        }
        pairs
    }

    /// Returns a request for a part of the memory of `count` vectors from `first` on: the part `part` of `parts`, in `steps` steps.
    pub(super) fn request(self, [first, count]: [usize; 2], part: [usize; 2], steps: usize) -> LineRequests {
        let count = count.min(self.count.saturating_sub(first));
        let runs = if self.depth_stride == 1 {
            [count, self.depth, self.stride]
        } else {
            [self.depth, count, self.depth_stride]
        };
        LineRequests::new(self.data.as_ptr().wrapping_add(first * self.stride), runs, part, steps)
    }

    /// Packs vectors whose elements are neighbours.
    ///
    /// # Safety
    /// `into` must point to the strip's first word.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack_transposed(self, strip: Strip, into: *mut u32) {
        for start in (0..self.pairs).step_by(LANES) {
            let vectors = self.vectors(strip.first, strip.present, start);
            for (pair, words) in (start..self.pairs).zip(transpose(vectors)) {
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
        for pair in 0..self.pairs {
            let (even, odd) = (self.elements(strip, 2 * pair), self.elements(strip, 2 * pair + 1));
            let into = into.wrapping_add(pair * strip.width);
            let low = _mm512_permutex2var_epi16(even, low, odd);
            let high = _mm512_permutex2var_epi16(even, high, odd);
            // SAFETY: the pair is one of the vector's, the mask ends at the strip's last word, and masked
            // words are not accessed; the pointer to masked words may be beyond the memory.
            unsafe {
                _mm512_mask_storeu_epi32(into.cast(), low_stored, low);
                _mm512_mask_storeu_epi32(into.wrapping_add(LANES).cast(), high_stored, high);
            }
        }
    }

    /// Returns an element of each vector of a strip. Elements after the last one are zero.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn elements(self, strip: Strip, index: usize) -> __m512i {
        if index >= self.depth {
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
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn interleaving() -> [__m512i; 2] {
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::scratch::Scratch;

    /// Checks the packed forms of `count` vectors of `depth` elements, in both orientations, on a processor with
    /// AVX-512.
    fn check(count: usize, depth: usize) {
        let element = |vector: usize, index: usize| (vector * 131 + index + 1) as u16;
        let [by_vector, by_index] = [
            (0..count * depth).map(|i| element(i / depth, i % depth)).collect::<Vec<_>>(),
            (0..count * depth).map(|i| element(i % count, i / count)).collect(),
        ]
        .map(|bits| bits.into_iter().map(bf16::from_bits).collect::<Vec<_>>());
        let word = |vector: usize, pair: usize| {
            let bits = |index| if vector < count && index < depth { element(vector, index) } else { 0 };
            u32::from(bits(2 * pair)) | (u32::from(bits(2 * pair + 1)) << 16)
        };
        for matrix in
            [Matrix::new(&by_vector, count, depth), Matrix::new(&by_index, depth, count).transposed()]
        {
            for at_once in [1, LANES] {
                let vectors = Vectors::rows_of(matrix, at_once);
                let pairs = depth.div_ceil(2).next_multiple_of(at_once);
                assert_eq!(vectors.pairs(), pairs);
                for first in (0..count).step_by(2 * LANES) {
                    // SAFETY: the processor has the instructions, and `packed` gives memory for all words.
                    let words =
                        packed(2 * LANES * pairs, |into| unsafe { vectors.pack(first, 2 * LANES, into) });
                    for (i, &found) in words.iter().enumerate() {
                        let (vector, pair) = (first + i % (2 * LANES), i / (2 * LANES));
                        assert_eq!(found, word(vector, pair), "{count} {depth}: {vector} {pair}");
                    }
                }
            }
            let vectors = Vectors::rows_of(matrix, LANES);
            let (rows, tiles) = (count.next_multiple_of(LANES), vectors.pairs() / LANES);
            // SAFETY: as above.
            let words = packed(rows * vectors.pairs(), |into| unsafe { vectors.pack_tiles(0, count, into) });
            for (i, &found) in words.iter().enumerate() {
                let (row, tile) = (i / LANES % LANES, i / (LANES * LANES));
                let vector = tile / tiles * LANES + row;
                let pair = tile % tiles * LANES + i % LANES;
                assert_eq!(found, word(vector, pair), "tiles of {count} {depth}: {vector} {pair}");
            }
        }
    }

    /// Returns the words that `pack` writes.
    fn packed(words: usize, pack: impl FnOnce(*mut u32)) -> Vec<u32> {
        let mut memory = Scratch::new(words);
        let start = memory.as_mut_ptr();
        // SAFETY: the memory has so many words, and each has a value before it is read.
        unsafe {
            (0..words).for_each(|i| start.add(i).write(u32::MAX));
            pack(start);
            (0..words).map(|i| start.add(i).read()).collect()
        }
    }

    #[test]
    fn each_pair_of_a_vector_has_its_word() {
        if !is_x86_feature_detected!("avx512bw") || !is_x86_feature_detected!("avx512vl") {
            let _said = writeln!(std::io::stderr(), "SKIPPED: packing with AVX-512, which is not available");
            return;
        }
        for count in [1, 2, 15, 16, 17, 32, 33, 50] {
            for depth in [1, 2, 31, 32, 33, 70] {
                check(count, depth);
            }
        }
    }
}
