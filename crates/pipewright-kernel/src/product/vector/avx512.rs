//! Registers of AVX-512.

use std::arch::x86_64::*;

use super::register::Vector;

impl Vector for __m512 {
    const LANES: usize = 16;

    type Square = [Self; 16];

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: as the trait says, here and in all functions below.
        unsafe { _mm512_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        // SAFETY: as above; masked elements are not accessed.
        unsafe { _mm512_maskz_loadu_ps(mask(count), from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(to, self) };
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        // SAFETY: as above; masked elements are not accessed.
        unsafe { _mm512_mask_storeu_ps(to, mask(count), self) };
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, sum: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(self, factor, sum) }
    }

    #[inline(always)]
    unsafe fn flush(self, least: &mut Self) -> Self {
        // SAFETY: as above.
        unsafe {
            let (magnitude, normal) = (_mm512_abs_ps(self), _mm512_set1_ps(f32::MIN_POSITIVE));
            let is_least = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(magnitude, normal);
            *least = _mm512_mask_mov_ps(*least, is_least, _mm512_set1_ps(1.0));
            let is_subnormal = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitude, normal);
            let bits = _mm512_castps_si512(self);
            let sign = _mm512_set1_epi32(i32::MIN);
            _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, is_subnormal, bits, sign))
        }
    }

    #[inline(always)]
    unsafe fn square() -> Self::Square {
        // SAFETY: as above.
        unsafe { [_mm512_setzero_ps(); 16] }
    }

    #[inline(always)]
    unsafe fn transpose(square: Self::Square) -> Self::Square {
        // SAFETY: as above. The types have the same bits.
        unsafe {
            let words = std::mem::transmute::<Self::Square, [__m512i; 16]>(square);
            std::mem::transmute::<[__m512i; 16], Self::Square>(transpose(words))
        }
    }
}

/// Returns a mask of the `count` lowest bits, at most 16.
#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

/// Transposes a square of words: first within blocks of 4 x 4, then the blocks.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
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
