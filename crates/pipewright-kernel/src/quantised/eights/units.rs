//! The instructions for sixteen lanes: of any processor, AVX2 and AVX-512. Their results have the same bits.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::simd::LANES;

/// The bytes of codes of all lanes.
const BYTES: usize = 4 * LANES;

/// Operations on sixteen lanes.
pub(super) trait Unit: Copy {
    type Lanes: Copy;
    /// Four bytes for each lane.
    type Codes: Copy;

    fn zero(self) -> Self::Lanes;
    fn load(self, lanes: &[f32; LANES]) -> Self::Lanes;
    /// Returns one number in the lower half of the lanes, and one in the upper half.
    fn halves(self, numbers: &[f32; 2]) -> Self::Lanes;
    fn stored(self, lanes: Self::Lanes) -> [f32; LANES];
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Returns `a b + c`, rounded once.
    fn multiply_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    fn no_codes(self) -> Self::Codes;
    fn codes(self, bytes: &[u8; BYTES]) -> Self::Codes;
    /// Returns the numbers of the four bits from bit `shift` of each lane on.
    fn look_up(self, numbers: Self::Lanes, codes: Self::Codes, shift: i32) -> Self::Lanes;
    /// Tells the processor that bytes will be read. The address may be invalid.
    fn prefetch(self, address: *const u8);
}

/// The operations of any processor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

impl Unit for Scalar {
    type Lanes = [f32; LANES];
    type Codes = [u32; LANES];

    fn zero(self) -> Self::Lanes {
        [0.0; LANES]
    }

    fn load(self, lanes: &[f32; LANES]) -> Self::Lanes {
        *lanes
    }

    fn halves(self, numbers: &[f32; 2]) -> Self::Lanes {
        std::array::from_fn(|lane| numbers[2 * lane / LANES])
    }

    fn stored(self, lanes: Self::Lanes) -> [f32; LANES] {
        lanes
    }

    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        std::array::from_fn(|lane| a[lane] + b[lane])
    }

    fn multiply_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    fn no_codes(self) -> Self::Codes {
        [0; LANES]
    }

    fn codes(self, bytes: &[u8; BYTES]) -> Self::Codes {
        let words = bytes.as_chunks::<4>().0;
        std::array::from_fn(|lane| u32::from_le_bytes(words[lane]))
    }

    fn look_up(self, numbers: Self::Lanes, codes: Self::Codes, shift: i32) -> Self::Lanes {
        codes.map(|code| numbers[(code >> shift & 15) as usize])
    }

    fn prefetch(self, _: *const u8) {}
}

/// Proves that the processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }
}

#[cfg(target_arch = "x86_64")]
impl Unit for Avx512 {
    type Lanes = __m512;
    type Codes = __m512i;

    #[inline(always)]
    fn zero(self) -> __m512 {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    fn load(self, lanes: &[f32; LANES]) -> __m512 {
        // SAFETY: `self` proves that the processor has the instructions, and the lanes fill a register.
        unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
    }

    #[inline(always)]
    fn halves(self, &[low, high]: &[f32; 2]) -> __m512 {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(low), _mm512_set1_ps(high)) }
    }

    #[inline(always)]
    fn stored(self, lanes: __m512) -> [f32; LANES] {
        let mut stored = [0.0; LANES];
        // SAFETY: `self` proves that the processor has the instructions, and the lanes fill a register.
        unsafe { _mm512_storeu_ps(stored.as_mut_ptr(), lanes) };
        stored
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn multiply_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn no_codes(self) -> __m512i {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn codes(self, bytes: &[u8; BYTES]) -> __m512i {
        // SAFETY: `self` proves that the processor has the instructions, and the bytes fill a register.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn look_up(self, numbers: __m512, codes: __m512i, shift: i32) -> __m512 {
        // A permutation reads the lower four bits of an index.
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { _mm512_permutexvar_ps(_mm512_srl_epi32(codes, _mm_cvtsi32_si128(shift)), numbers) }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // SAFETY: a prefetch reads nothing that a program sees, and ignores invalid addresses.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
}

/// Proves that the processor has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

#[cfg(target_arch = "x86_64")]
impl Unit for Avx2 {
    type Lanes = [__m256; 2];
    type Codes = [__m256i; 2];

    #[inline(always)]
    fn zero(self) -> Self::Lanes {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    fn load(self, lanes: &[f32; LANES]) -> Self::Lanes {
        // SAFETY: `self` proves that the processor has the instructions, and the lanes fill two registers.
        unsafe { [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(8))] }
    }

    #[inline(always)]
    fn halves(self, &[low, high]: &[f32; 2]) -> Self::Lanes {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { [_mm256_set1_ps(low), _mm256_set1_ps(high)] }
    }

    #[inline(always)]
    fn stored(self, lanes: Self::Lanes) -> [f32; LANES] {
        let mut stored = [0.0; LANES];
        // SAFETY: `self` proves that the processor has the instructions, and the lanes fill two registers.
        unsafe {
            _mm256_storeu_ps(stored.as_mut_ptr(), lanes[0]);
            _mm256_storeu_ps(stored.as_mut_ptr().add(8), lanes[1]);
        }
        stored
    }

    #[inline(always)]
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn multiply_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn no_codes(self) -> Self::Codes {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    fn codes(self, bytes: &[u8; BYTES]) -> Self::Codes {
        let from = bytes.as_ptr();
        // SAFETY: `self` proves that the processor has the instructions, and the bytes fill two registers.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }

    #[inline(always)]
    fn look_up(self, numbers: Self::Lanes, codes: Self::Codes, shift: i32) -> Self::Lanes {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe {
            [
                look_up_in_halves(numbers, _mm256_srl_epi32(codes[0], _mm_cvtsi32_si128(shift))),
                look_up_in_halves(numbers, _mm256_srl_epi32(codes[1], _mm_cvtsi32_si128(shift))),
            ]
        }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // SAFETY: a prefetch reads nothing that a program sees, and ignores invalid addresses.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
}

/// Returns the numbers of the lower four bits of each lane: one permutation for each half of the numbers, whose results
/// the fourth bit chooses from.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma")]
fn look_up_in_halves(numbers: [__m256; 2], codes: __m256i) -> __m256 {
    let [low, high] =
        [_mm256_permutevar8x32_ps(numbers[0], codes), _mm256_permutevar8x32_ps(numbers[1], codes)];
    _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes)))
}
