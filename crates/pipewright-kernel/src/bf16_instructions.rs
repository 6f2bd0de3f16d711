//! Rounding to bfloat16, and sums of bfloat16, with the instruction `vcvtne2ps2bf16` of AVX512-BF16.
//! Arithmetic on integers ([`narrow`]) takes twice as long.
//!
//! The instruction treats subnormal numbers as zero. Vectors with such a number are rounded by the arithmetic
//! on integers, so the bits do not depend on the processor.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use half::bf16;

use super::rounding::{narrow, widen};

/// Elements of a register of bfloat16, and of two registers of single precision.
const BLOCK: usize = 32;

/// The class of subnormal numbers.
const SUBNORMAL: i32 = 0x20;

/// Proves that the processor has the instructions.
#[derive(Clone, Copy)]
pub(crate) struct Instructions(());

impl Instructions {
    #[inline]
    pub(crate) fn detect() -> Option<Self> {
        #[cfg(feature = "testing")]
        if crate::testing::is_hidden() {
            return None;
        }
        let are_available = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16");
        are_available.then_some(Self(()))
    }

    /// Writes the elements in bfloat16.
    pub(crate) fn narrow(self, elements: &[f32], narrowed: &mut [MaybeUninit<bf16>]) {
        // SAFETY: the processor has the instructions.
        unsafe { narrow_blocks(elements, narrowed) }
    }

    /// Writes the sums of the elements of `a` and `b`, which have the same length.
    pub(crate) fn add(self, a: &[bf16], b: &[bf16], sums: &mut [MaybeUninit<bf16>]) {
        // SAFETY: the processor has the instructions.
        unsafe { add_blocks(a, b, sums) }
    }

    /// Adds the elements of `other` to the elements of `sums`, which have the same length.
    pub(crate) fn add_assign(self, sums: &mut [bf16], other: &[bf16]) {
        // SAFETY: the processor has the instructions.
        unsafe { add_assign_blocks(sums, other) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn narrow_blocks(elements: &[f32], narrowed: &mut [MaybeUninit<bf16>]) {
    assert_eq!(elements.len(), narrowed.len(), "both have the same length");
    let (blocks, rest) = elements.as_chunks::<BLOCK>();
    let (narrowed, narrowed_rest) = narrowed.as_chunks_mut::<BLOCK>();
    for (block, narrowed) in blocks.iter().zip(narrowed) {
        // SAFETY: a block has the elements of two registers.
        let (low, high) =
            unsafe { (_mm512_loadu_ps(block.as_ptr()), _mm512_loadu_ps(block.as_ptr().add(BLOCK / 2))) };
        // SAFETY: the block of results has the elements of one register.
        unsafe { _mm512_storeu_si512(narrowed.as_mut_ptr().cast(), round(low, high)) };
    }
    for (to, &element) in narrowed_rest.iter_mut().zip(rest) {
        to.write(narrow(element));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn add_blocks(a: &[bf16], b: &[bf16], sums: &mut [MaybeUninit<bf16>]) {
    assert_eq!((a.len(), a.len()), (b.len(), sums.len()), "all have the same length");
    let (a, a_rest) = a.as_chunks::<BLOCK>();
    let (b, b_rest) = b.as_chunks::<BLOCK>();
    let (sums, sums_rest) = sums.as_chunks_mut::<BLOCK>();
    for ((a, b), sums) in a.iter().zip(b).zip(sums) {
        // SAFETY: the block has the elements of one register.
        unsafe { _mm512_storeu_si512(sums.as_mut_ptr().cast(), sum(a, b)) };
    }
    for ((sum, &a), &b) in sums_rest.iter_mut().zip(a_rest).zip(b_rest) {
        sum.write(narrow(widen(a) + widen(b)));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn add_assign_blocks(sums: &mut [bf16], other: &[bf16]) {
    assert_eq!(sums.len(), other.len(), "both have the same length");
    let (sums, sums_rest) = sums.as_chunks_mut::<BLOCK>();
    let (other, other_rest) = other.as_chunks::<BLOCK>();
    for (sums, other) in sums.iter_mut().zip(other) {
        let sum = sum(sums, other);
        // SAFETY: the block has the elements of one register.
        unsafe { _mm512_storeu_si512(sums.as_mut_ptr().cast(), sum) };
    }
    for (sum, &other) in sums_rest.iter_mut().zip(other_rest) {
        *sum = narrow(widen(*sum) + widen(other));
    }
}

/// Returns the sums of two blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn sum(a: &[bf16; BLOCK], b: &[bf16; BLOCK]) -> __m512i {
    // SAFETY: each block has the elements of one register.
    let (a, b) = unsafe { (_mm512_loadu_si512(a.as_ptr().cast()), _mm512_loadu_si512(b.as_ptr().cast())) };
    let even = _mm512_add_ps(even_elements(a), even_elements(b));
    let odd = _mm512_add_ps(odd_elements(a), odd_elements(b));
    // The even sums come first.
    _mm512_permutexvar_epi16(interleaving(), round(even, odd))
}

/// Returns the elements 0, 2, ... of a block in single precision.
#[inline]
#[target_feature(enable = "avx512f")]
fn even_elements(block: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(block))
}

/// Returns the elements 1, 3, ... of a block in single precision.
#[inline]
#[target_feature(enable = "avx512f")]
fn odd_elements(block: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(block, _mm512_set1_epi32(0xffff_0000_u32.cast_signed())))
}

/// Returns the indices that interleave the two halves of a register: 0, 16, 1, 17, ...
#[inline]
#[target_feature(enable = "avx512f")]
fn interleaving() -> __m512i {
    let even = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    _mm512_or_si512(even, _mm512_slli_epi32::<16>(_mm512_add_epi32(even, _mm512_set1_epi32(16))))
}

/// Returns the elements of `low` and then of `high` in bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn round(low: __m512, high: __m512) -> __m512i {
    let subnormal = _mm512_fpclass_ps_mask::<SUBNORMAL>(low) | _mm512_fpclass_ps_mask::<SUBNORMAL>(high);
    if subnormal != 0 {
        return round_by_integers(low, high);
    }
    // SAFETY: the two types of registers have the same bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn round_by_integers(low: __m512, high: __m512) -> __m512i {
    let low = _mm512_castsi256_si512(round_half_by_integers(low));
    _mm512_inserti64x4::<1>(low, round_half_by_integers(high))
}

/// Rounds each element with the operations of [`narrow`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn round_half_by_integers(elements: __m512) -> __m256i {
    let bits = _mm512_castps_si512(elements);
    let high_bits = _mm512_srli_epi32::<16>(bits);
    let is_odd = _mm512_and_si512(high_bits, _mm512_set1_epi32(1));
    let carried = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(elements, elements);
    let not_a_number = _mm512_or_si512(high_bits, _mm512_set1_epi32(0x40));
    let rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(carried), is_nan, not_a_number);
    _mm512_cvtepi32_epi16(rounded)
}
