//! Look-ups of elements of four bits with AVX-512: the sixteen scaled numbers of a block are one register, from
//! which a permutation takes the numbers of 32 halves of bytes.

use std::arch::x86_64::*;

use half::bf16;

use crate::rounding::narrow;

/// Proves that the processor has the instructions.
#[derive(Clone, Copy)]
pub(crate) struct Available(());

impl Available {
    #[inline(always)]
    pub(super) fn detect() -> Option<Self> {
        #[cfg(feature = "testing")]
        if crate::testing::is_hidden() {
            return None;
        }
        let are_available = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        are_available.then_some(Self(()))
    }
}

/// The lengths of blocks, all of them even.
#[derive(Clone, Copy)]
pub(crate) struct Lengths {
    /// The elements of the first block that are looked up.
    pub(super) first: usize,
    /// The elements of every other block, except that the last one may have fewer.
    pub(super) others: usize,
}

/// Writes `table[half] * scale` for halves of `bytes` in blocks, whose scales `scale_of` returns.
#[inline(always)]
pub(super) fn single_blocks(
    _: Available,
    bytes: &[u8],
    table: &[f32; 16],
    scale_of: impl Fn(usize) -> f32,
    lengths: Lengths,
    out: &mut [f32],
) {
    // SAFETY: the processor has the instructions.
    unsafe { single_blocks_in_registers(bytes, table, scale_of, lengths, out) }
}

/// Like [`single_blocks`], with each number rounded to bfloat16.
#[inline(always)]
pub(super) fn half_blocks(
    _: Available,
    bytes: &[u8],
    table: &[f32; 16],
    scale_of: impl Fn(usize) -> f32,
    lengths: Lengths,
    out: &mut [bf16],
) {
    // SAFETY: the processor has the instructions.
    unsafe { half_blocks_in_registers(bytes, table, scale_of, lengths, out) }
}

/// Writes `table[half] * scale` for parts of blocks of `width` elements, whose bytes and scales `next` returns.
#[inline(always)]
pub(super) fn single_parts<'a>(
    _: Available,
    table: &[f32; 16],
    next: impl FnMut() -> (&'a [u8], f32),
    width: usize,
    out: &mut [f32],
) {
    // SAFETY: the processor has the instructions.
    unsafe { single_parts_in_registers(table, next, width, out) }
}

/// Like [`single_parts`], with each number rounded to bfloat16.
#[inline(always)]
pub(super) fn half_parts<'a>(
    _: Available,
    table: &[f32; 16],
    next: impl FnMut() -> (&'a [u8], f32),
    width: usize,
    out: &mut [bf16],
) {
    // SAFETY: the processor has the instructions.
    unsafe { half_parts_in_registers(table, next, width, out) }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn single_parts_in_registers<'a>(
    table: &[f32; 16],
    mut next: impl FnMut() -> (&'a [u8], f32),
    width: usize,
    out: &mut [f32],
) {
    for out in out.chunks_exact_mut(width) {
        let (bytes, scale) = next();
        single_in_registers(bytes, table, scale, out);
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn half_parts_in_registers<'a>(
    table: &[f32; 16],
    mut next: impl FnMut() -> (&'a [u8], f32),
    width: usize,
    out: &mut [bf16],
) {
    for out in out.chunks_exact_mut(width) {
        let (bytes, scale) = next();
        half_in_registers(bytes, table, scale, out);
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn single_blocks_in_registers(
    mut bytes: &[u8],
    table: &[f32; 16],
    scale_of: impl Fn(usize) -> f32,
    lengths: Lengths,
    mut out: &mut [f32],
) {
    let (mut block, mut length) = (0, lengths.first);
    while !out.is_empty() {
        let (own, rest) = out.split_at_mut(length.min(out.len()));
        let (own_bytes, rest_bytes) = bytes.split_at(own.len().div_ceil(2));
        single_in_registers(own_bytes, table, scale_of(block), own);
        (out, bytes, block, length) = (rest, rest_bytes, block + 1, lengths.others);
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn half_blocks_in_registers(
    mut bytes: &[u8],
    table: &[f32; 16],
    scale_of: impl Fn(usize) -> f32,
    lengths: Lengths,
    mut out: &mut [bf16],
) {
    let (mut block, mut length) = (0, lengths.first);
    while !out.is_empty() {
        let (own, rest) = out.split_at_mut(length.min(out.len()));
        let (own_bytes, rest_bytes) = bytes.split_at(own.len().div_ceil(2));
        half_in_registers(own_bytes, table, scale_of(block), own);
        (out, bytes, block, length) = (rest, rest_bytes, block + 1, lengths.others);
    }
}

/// Writes `table[half] * scale` for halves of `bytes`.
#[inline(always)]
pub(super) fn single(_: Available, bytes: &[u8], table: &[f32; 16], scale: f32, out: &mut [f32]) {
    // SAFETY: the processor has the instructions.
    unsafe { single_in_registers(bytes, table, scale, out) }
}

/// Like [`single`], with each number rounded to bfloat16.
#[inline(always)]
pub(super) fn half(_: Available, bytes: &[u8], table: &[f32; 16], scale: f32, out: &mut [bf16]) {
    // SAFETY: the processor has the instructions.
    unsafe { half_in_registers(bytes, table, scale, out) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn single_in_registers(bytes: &[u8], table: &[f32; 16], scale: f32, out: &mut [f32]) {
    // SAFETY: the table has the elements of a register.
    let scaled = unsafe { _mm512_mul_ps(_mm512_loadu_ps(table.as_ptr()), _mm512_set1_ps(scale)) };
    let low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    let (chunks, rest) = out.as_chunks_mut::<32>();
    let (whole, others) = bytes.split_at(16 * chunks.len());
    for (bytes, out) in whole.as_chunks::<16>().0.iter().zip(chunks) {
        // SAFETY: the chunk has the bytes of a register.
        let bytes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
        // A permutation reads the lower four bits of an index.
        let even = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), scaled);
        let odd = _mm512_permutexvar_ps(bytes, scaled);
        // SAFETY: the chunk has the elements of two registers.
        unsafe {
            _mm512_storeu_ps(out.as_mut_ptr(), _mm512_permutex2var_ps(even, low, odd));
            _mm512_storeu_ps(out.as_mut_ptr().add(16), _mm512_permutex2var_ps(even, high, odd));
        }
    }
    for (index, to) in rest.iter_mut().enumerate() {
        *to = table[half_of(others, index)] * scale;
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn half_in_registers(bytes: &[u8], table: &[f32; 16], scale: f32, out: &mut [bf16]) {
    // SAFETY: the table has the elements of a register.
    let scaled = unsafe { _mm512_mul_ps(_mm512_loadu_ps(table.as_ptr()), _mm512_set1_ps(scale)) };
    // Finite numbers are rounded as by `narrow`. A scale that is not finite is refused when a matrix is made; a
    // product of two finite numbers that overflows is infinite, and stays so.
    let bits = _mm512_castps_si512(scaled);
    let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let carried = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    let rounded = _mm512_srli_epi32::<16>(carried);
    // The sixteen numbers twice, so that the fifth bit of an index does not count.
    let numbers = _mm512_cvtepi32_epi16(rounded);
    let numbers = _mm512_broadcast_i64x4(numbers);
    let words = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    let low =
        _mm512_add_epi32(words, _mm512_slli_epi32::<16>(_mm512_add_epi32(words, _mm512_set1_epi32(32))));
    let high = _mm512_add_epi32(low, _mm512_set1_epi32(0x0010_0010));
    let (chunks, rest) = out.as_chunks_mut::<64>();
    let (whole, others) = bytes.split_at(32 * chunks.len());
    for (bytes, out) in whole.as_chunks::<32>().0.iter().zip(chunks) {
        // SAFETY: the chunk has the bytes of a register.
        let bytes = _mm512_cvtepu8_epi16(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) });
        let even = _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(bytes), numbers);
        let odd = _mm512_permutexvar_epi16(bytes, numbers);
        // SAFETY: the chunk has the elements of two registers.
        unsafe {
            _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(out.as_mut_ptr().add(32).cast(), _mm512_permutex2var_epi16(even, high, odd));
        }
    }
    let (chunks, rest) = rest.as_chunks_mut::<32>();
    let (whole, others) = others.split_at(16 * chunks.len());
    for (bytes, out) in whole.as_chunks::<16>().0.iter().zip(chunks) {
        // SAFETY: the chunk has the bytes of half a register.
        let bytes = _mm256_cvtepu8_epi16(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
        let bytes = _mm512_castsi256_si512(bytes);
        let even = _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(bytes), numbers);
        let odd = _mm512_permutexvar_epi16(bytes, numbers);
        // SAFETY: the chunk has the elements of a register.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_permutex2var_epi16(even, low, odd)) };
    }
    for (index, to) in rest.iter_mut().enumerate() {
        *to = narrow(table[half_of(others, index)] * scale);
    }
}

/// Returns a half of a byte.
#[inline(always)]
fn half_of(bytes: &[u8], index: usize) -> usize {
    usize::from(if index.is_multiple_of(2) { bytes[index / 2] >> 4 } else { bytes[index / 2] & 15 })
}
