//! Products of few rows with a right operand whose rows are neighbours, as in generation, with AVX512-BF16. The operand is
//! larger than the caches and each element is used a few times, so it is read once, in long runs, and not packed.

use std::arch::x86_64::*;

use half::bf16;

use super::blocked::Target;
use super::instruction::Instruction;
use super::pack::{Vectors, interleaving, low_bits};
use super::tile::{COLUMNS, Tile};
use crate::product::{LineRequests, Matrix, each_strip, prefetch_runs};
use crate::scratch::Scratch;

/// With more rows, packing takes a small share of the time.
const MOST_ROWS: usize = 16;

/// The most rows whose sums are in registers together.
const AT_ONCE: usize = 12;

/// Pairs of rows of the right operand that are read at once.
const PAIRS: usize = 4;

/// How many columns ahead of the products the processor requests.
const AHEAD: usize = 512;

/// Returns whether a product is faster this way.
pub(super) fn is_faster(instruction: Instruction, a: Matrix<'_, bf16>, b: Matrix<'_, bf16>) -> bool {
    instruction == Instruction::Avx512Bf16
        && (1..=MOST_ROWS).contains(&a.rows)
        && b.column_stride == 1
        && a.columns >= 16
        && b.columns >= 128
}

/// The operands and the result, which threads share.
struct Shared<'a> {
    /// For each pair of the inner dimension, a word per row of the groups.
    left: *const u32,
    rows: usize,
    right: Matrix<'a, bf16>,
    target: Target,
}

// SAFETY: threads share the operands for reading, and write different columns of the target.
unsafe impl Sync for Shared<'_> {}

/// Computes `a b`.
///
/// # Safety
/// As for [`multiply`](super::blocked::multiply), for a product for which [`is_faster`] returns true.
pub(super) unsafe fn multiply(a: Matrix<'_, bf16>, b: Matrix<'_, bf16>, target: Target) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product agree");
    let rows = Vectors::rows_of(a, 1);
    // The sums of a group of rows are in registers together. A row that is missing in the second group is zero.
    let groups = a.rows.div_ceil(AT_ONCE);
    let height = a.rows.div_ceil(groups);
    let mut left = Scratch::new(groups * height * rows.pairs());
    let left = left.as_mut_ptr();
    // SAFETY: the processor has the instructions, and the memory has a word for each row and pair.
    unsafe { rows.pack(0, groups * height, left) };
    let shared = &Shared { left, rows: a.rows, right: b, target };
    // SAFETY: the processor has the instructions, the left operand is packed, and each strip is computed once.
    each_strip([a.rows, b.columns, a.columns], COLUMNS, |columns| unsafe {
        match (groups, height) {
            (1, 1) => shared.compute::<1, 1>(columns),
            (1, 2) => shared.compute::<1, 2>(columns),
            (1, 3) => shared.compute::<1, 3>(columns),
            (1, 4) => shared.compute::<1, 4>(columns),
            (1, 5) => shared.compute::<1, 5>(columns),
            (1, 6) => shared.compute::<1, 6>(columns),
            (1, 7) => shared.compute::<1, 7>(columns),
            (1, 8) => shared.compute::<1, 8>(columns),
            (1, 9) => shared.compute::<1, 9>(columns),
            (1, 10) => shared.compute::<1, 10>(columns),
            (1, 11) => shared.compute::<1, 11>(columns),
            (1, _) => shared.compute::<1, AT_ONCE>(columns),
            (_, 7) => shared.compute::<2, 7>(columns),
            _ => shared.compute::<2, { MOST_ROWS / 2 }>(columns),
        }
    });
}

impl Shared<'_> {
    /// Computes `count` columns from `first` on, of `GROUPS` groups of `N` rows.
    ///
    /// # Safety
    /// As [`multiply`]; the left operand must be packed, and no other thread may use the columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn compute<const GROUPS: usize, const N: usize>(&self, [first, count]: [usize; 2]) {
        let width = count.next_multiple_of(COLUMNS);
        let mut sums = Scratch::new(N * GROUPS * width);
        let sums: *mut f32 = sums.as_mut_ptr().cast();
        let pairs = self.right.rows.div_ceil(2);
        for start in (0..pairs).step_by(PAIRS) {
            let end = pairs.min(start + PAIRS);
            for column in (0..count).step_by(COLUMNS) {
                self.prefetch(start, column, [first, count]);
                for group in 0..GROUPS {
                    // SAFETY: the sums have whole registers for each row, and the left operand has all words.
                    unsafe {
                        let at = sums.add(group * N * width + column);
                        let mut held = [[_mm512_setzero_ps(); 2]; N];
                        if start > 0 {
                            held = load(at, width);
                        }
                        for pair in start..end {
                            let [low, high] = self.pair(pair, first + column, count - column);
                            let left = self.left.add((pair * GROUPS + group) * N);
                            for (row, [low_sum, high_sum]) in held.iter_mut().enumerate() {
                                let element = _mm512_set1_epi32(left.add(row).read().cast_signed());
                                let element = std::mem::transmute::<__m512i, __m512bh>(element);
                                *low_sum = _mm512_dpbf16_ps(*low_sum, element, low);
                                *high_sum = _mm512_dpbf16_ps(*high_sum, element, high);
                            }
                        }
                        for (row, sums) in held.into_iter().enumerate() {
                            for (half, sum) in sums.into_iter().enumerate() {
                                _mm512_storeu_ps(at.add(row * width + half * COLUMNS / 2), sum);
                            }
                        }
                    }
                }
            }
        }
        for column in (0..count).step_by(COLUMNS) {
            for row in 0..self.rows {
                // SAFETY: all sums are written, and the target has the row and columns of the tile.
                unsafe {
                    let output = row * self.target.row_stride + first + column;
                    let tile = Tile {
                        pairs,
                        left: self.left,
                        right: std::ptr::null(),
                        output: self.target.output.at(output),
                        stride: self.target.row_stride,
                        rows: 1,
                        columns: COLUMNS.min(count - column),
                        update: self.target.update.map(|update| update.at(row, first + column)),
                        requests: [LineRequests::of_one_line(self.left); 2],
                    };
                    tile.finish::<1>(load(sums.add(row * width + column), width));
                }
            }
        }
    }

    /// Requests the elements of [`PAIRS`] pairs that are read [`AHEAD`] columns later. After the last column of a strip, the next
    /// pairs are read.
    #[inline]
    fn prefetch(&self, pair: usize, column: usize, [first, count]: [usize; 2]) {
        let ahead = column + AHEAD.min(count);
        let (pair, column) = if ahead < count { (pair, ahead) } else { (pair + PAIRS, ahead - count) };
        let stride = self.right.row_stride;
        let next = self.right.data.as_ptr().wrapping_add(2 * pair * stride + first + column);
        prefetch_runs(next, [2 * PAIRS, COLUMNS, stride]);
    }

    /// Returns a pair of elements of each of [`COLUMNS`] columns from `column` on. Columns from `present` on are zero, and so are
    /// elements after the last one.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn pair(&self, pair: usize, column: usize, present: usize) -> [__m512bh; 2] {
        let mask = low_bits(present.min(COLUMNS));
        let element = |row: usize| {
            let mask = if row < self.right.rows { mask } else { 0 };
            let at = self.right.data.as_ptr().wrapping_add(row * self.right.row_stride + column);
            // SAFETY: the mask ends at the last column, and masked elements are not accessed.
            unsafe { _mm512_maskz_loadu_epi16(mask, at.cast()) }
        };
        let [low, high] = interleaving();
        let (even, odd) = (element(2 * pair), element(2 * pair + 1));
        let [low, high] =
            [_mm512_permutex2var_epi16(even, low, odd), _mm512_permutex2var_epi16(even, high, odd)];
        // SAFETY: the two types of registers have the same bits.
        unsafe {
            [std::mem::transmute::<__m512i, __m512bh>(low), std::mem::transmute::<__m512i, __m512bh>(high)]
        }
    }
}

/// Returns the sums of [`COLUMNS`] columns of `N` rows, which begin `stride` sums apart.
///
/// # Safety
/// The sums must exist.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load<const N: usize>(at: *const f32, stride: usize) -> [[__m512; 2]; N] {
    let mut sums = [[_mm512_setzero_ps(); 2]; N];
    for (row, sums) in sums.iter_mut().enumerate() {
        for (half, sum) in sums.iter_mut().enumerate() {
            // SAFETY: as the caller says.
            *sum = unsafe { _mm512_loadu_ps(at.add(row * stride + half * COLUMNS / 2)) };
        }
    }
    sums
}
