//! Registers of AVX2, with fused multiplication and addition.

use std::arch::x86_64::*;

use super::register::Vector;

impl Vector for __m256 {
    const LANES: usize = 8;

    type Square = [Self; 8];

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: as the trait says, here and in all functions below.
        unsafe { _mm256_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        // SAFETY: as above; masked elements are not accessed.
        unsafe { _mm256_maskload_ps(from, mask(count)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(to, self) };
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        // SAFETY: as above; masked elements are not accessed.
        unsafe { _mm256_maskstore_ps(to, mask(count), self) };
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, sum: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_fmadd_ps(self, factor, sum) }
    }

    #[inline(always)]
    unsafe fn flush(self, least: &mut Self) -> Self {
        // SAFETY: as above.
        unsafe {
            let (sign, normal) = (_mm256_set1_ps(-0.0), _mm256_set1_ps(f32::MIN_POSITIVE));
            let magnitude = _mm256_andnot_ps(sign, self);
            let is_least = _mm256_cmp_ps::<_CMP_EQ_OQ>(magnitude, normal);
            *least = _mm256_or_ps(*least, _mm256_and_ps(is_least, _mm256_set1_ps(1.0)));
            let is_subnormal = _mm256_cmp_ps::<_CMP_LT_OQ>(magnitude, normal);
            _mm256_andnot_ps(_mm256_andnot_ps(sign, is_subnormal), self)
        }
    }

    #[inline(always)]
    unsafe fn square() -> Self::Square {
        // SAFETY: as above.
        unsafe { [_mm256_setzero_ps(); 8] }
    }

    #[inline(always)]
    unsafe fn transpose(square: Self::Square) -> Self::Square {
        let mut halves = square;
        let mut quarters = square;
        let mut columns = square;
        // SAFETY: as above.
        unsafe {
            for i in [0, 2, 4, 6] {
                halves[i] = _mm256_unpacklo_ps(square[i], square[i + 1]);
                halves[i + 1] = _mm256_unpackhi_ps(square[i], square[i + 1]);
            }
            for i in [0, 4] {
                let [a, b, c, d] = [halves[i], halves[i + 1], halves[i + 2], halves[i + 3]];
                quarters[i] = _mm256_shuffle_ps::<0x44>(a, c);
                quarters[i + 1] = _mm256_shuffle_ps::<0xee>(a, c);
                quarters[i + 2] = _mm256_shuffle_ps::<0x44>(b, d);
                quarters[i + 3] = _mm256_shuffle_ps::<0xee>(b, d);
            }
            for i in [0, 1, 2, 3] {
                columns[i] = _mm256_permute2f128_ps::<0x20>(quarters[i], quarters[4 + i]);
                columns[4 + i] = _mm256_permute2f128_ps::<0x31>(quarters[i], quarters[4 + i]);
            }
        }
        columns
    }
}

/// Returns a mask of the `count` lowest lanes, at most 8.
#[inline(always)]
unsafe fn mask(count: usize) -> __m256i {
    // SAFETY: as the trait says.
    unsafe {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes)
    }
}
