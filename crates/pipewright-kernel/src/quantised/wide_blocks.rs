//! Elements of blocks with AVX-512: codes of four and five bits are looked up in registers with the numbers of their scale,
//! and codes of six and eight bits are converted. The elements have the bits of
//! the loops in [`blocks`](super::blocks), and products of a row the order of other forms ([`one_row`](super::one_row)).

use std::arch::x86_64::*;

use super::block_kind::BlockKind;
use super::lookup::Available;
use crate::simd::{LANES, fold};

/// The elements that are decoded at once.
pub(super) const STEP: usize = 4 * LANES;
/// The rows that are multiplied together, so that each number of `x` is read once for them.
pub(super) const ROWS: usize = 4;

/// A form of blocks.
trait Wide {
    const KIND: BlockKind;
    /// The bytes of a block, or of the blocks that have the elements of a step.
    const BYTES: usize = Self::KIND.bytes() * STEP.div_ceil(Self::KIND.elements());
    /// The steps of these bytes.
    const STEPS: usize = Self::KIND.elements().div_ceil(STEP);

    /// Returns numbers that the steps need.
    ///
    /// # Safety
    /// The processor must have the instructions, and `block` must have [`Wide::BYTES`] bytes.
    unsafe fn factors(block: *const u8) -> [f32; LANES];

    /// Returns the elements of a step.
    ///
    /// # Safety
    /// As [`Wide::factors`].
    unsafe fn elements(block: *const u8, factors: &[f32; LANES], step: usize) -> [__m512; 4];
}

/// Writes the elements of whole steps of a row, from the element `first` on, which begins a step.
pub(super) fn decode(_: Available, kind: BlockKind, row: &[u8], first: usize, out: &mut [f32]) {
    // SAFETY: the processor has the instructions.
    unsafe {
        match kind {
            BlockKind::Q4_0 => decode_in_registers::<Short<false, false>>(row, first, out),
            BlockKind::Q4_1 => decode_in_registers::<Short<false, true>>(row, first, out),
            BlockKind::Q5_0 => decode_in_registers::<Short<true, false>>(row, first, out),
            BlockKind::Q5_1 => decode_in_registers::<Short<true, true>>(row, first, out),
            BlockKind::Q8_0 => decode_in_registers::<Q8_0>(row, first, out),
            BlockKind::Q4K => decode_in_registers::<Long<false>>(row, first, out),
            BlockKind::Q5K => decode_in_registers::<Long<true>>(row, first, out),
            BlockKind::Q6K => decode_in_registers::<Q6K>(row, first, out),
        }
    }
}

/// Returns the products of rows with `x`, which has whole steps, in sums of `part` elements that are added.
pub(super) fn products(
    _: Available,
    kind: BlockKind,
    rows: [&[u8]; ROWS],
    x: &[f32],
    part: usize,
) -> [f32; ROWS] {
    // SAFETY: the processor has the instructions.
    unsafe {
        match kind {
            BlockKind::Q4_0 => products_in_registers::<Short<false, false>>(rows, x, part),
            BlockKind::Q4_1 => products_in_registers::<Short<false, true>>(rows, x, part),
            BlockKind::Q5_0 => products_in_registers::<Short<true, false>>(rows, x, part),
            BlockKind::Q5_1 => products_in_registers::<Short<true, true>>(rows, x, part),
            BlockKind::Q8_0 => products_in_registers::<Q8_0>(rows, x, part),
            BlockKind::Q4K => products_in_registers::<Long<false>>(rows, x, part),
            BlockKind::Q5K => products_in_registers::<Long<true>>(rows, x, part),
            BlockKind::Q6K => products_in_registers::<Q6K>(rows, x, part),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn decode_in_registers<W: Wide>(row: &[u8], first: usize, out: &mut [f32]) {
    let mut factors = None;
    for (index, out) in (first / STEP..).zip(out.as_chunks_mut::<STEP>().0) {
        let block = row[index / W::STEPS * W::BYTES..][..W::BYTES].as_ptr();
        let of_block = match factors {
            Some(factors) if !index.is_multiple_of(W::STEPS) => factors,
            // SAFETY: the block has its bytes.
            _ => unsafe { W::factors(block) },
        };
        factors = Some(of_block);
        // SAFETY: the block has its bytes.
        let elements = unsafe { W::elements(block, &of_block, index % W::STEPS) };
        for (elements, out) in elements.into_iter().zip(out.as_chunks_mut::<LANES>().0) {
            // SAFETY: the lanes fill a register.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), elements) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn products_in_registers<W: Wide>(rows: [&[u8]; ROWS], x: &[f32], part: usize) -> [f32; ROWS] {
    let steps = x.as_chunks::<STEP>().0;
    let count = steps.len() / W::STEPS;
    assert!(x.len() == count * W::STEPS * STEP && rows.iter().all(|row| row.len() == count * W::BYTES));
    let mut found = [-0.0; ROWS];
    let mut sums = [_mm512_setzero_ps(); ROWS];
    let next = rows.map(|row| row.as_ptr().wrapping_add(ROWS * row.len()));
    for (index, steps) in steps.chunks_exact(W::STEPS).enumerate() {
        let at = index * W::BYTES;
        let blocks = rows.map(|row| row[at..].as_ptr());
        for next in next {
            for line in (0..W::BYTES).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(at + line).cast());
            }
        }
        let mut factors = [[0.0; LANES]; ROWS];
        for (factors, block) in factors.iter_mut().zip(blocks) {
            // SAFETY: the block has its bytes.
            *factors = unsafe { W::factors(block) };
        }
        for (step, numbers) in steps.iter().enumerate() {
            let mut x = [_mm512_setzero_ps(); 4];
            for (x, numbers) in x.iter_mut().zip(numbers.as_chunks::<LANES>().0) {
                // SAFETY: the lanes fill a register.
                *x = unsafe { _mm512_loadu_ps(numbers.as_ptr()) };
            }
            for row in 0..ROWS {
                // SAFETY: the blocks have their bytes.
                let elements = unsafe { W::elements(blocks[row], &factors[row], step) };
                for (elements, x) in elements.into_iter().zip(x) {
                    sums[row] = _mm512_add_ps(sums[row], _mm512_mul_ps(elements, x));
                }
            }
        }
        let done = (index + 1) * W::STEPS * STEP;
        if done.is_multiple_of(part) || index + 1 == count {
            for (found, sums) in found.iter_mut().zip(&mut sums) {
                let mut lanes = [0.0; LANES];
                // SAFETY: the lanes fill a register.
                unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), *sums) };
                *found += fold(lanes, |a, b| a + b);
                *sums = _mm512_setzero_ps();
            }
        }
    }
    found
}

/// Returns the numbers of half precision at the places of some blocks.
///
/// # Safety
/// Each place must have two bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn halves<const N: usize>(places: [*const u8; N]) -> [f32; N] {
    let mut bits = 0;
    for (index, place) in places.into_iter().enumerate() {
        // SAFETY: the place has two bytes.
        bits |= u64::from(unsafe { place.cast::<u16>().read_unaligned() }) << (16 * index);
    }
    let numbers = _mm512_cvtph_ps(_mm256_castsi128_si256(_mm_cvtsi64_si128(bits.cast_signed())));
    let mut all = [0.0; LANES];
    // SAFETY: the numbers fill a register.
    unsafe { _mm512_storeu_ps(all.as_mut_ptr(), numbers) };
    std::array::from_fn(|index| all[index])
}

/// Returns sixteen bytes as words.
///
/// # Safety
/// There must be sixteen bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn words(bytes: *const u8) -> __m512i {
    // SAFETY: as the caller says.
    _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(bytes.cast()) })
}

/// Returns the numbers from 0 to 15.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn codes() -> __m512 {
    _mm512_set_ps(15.0, 14.0, 13.0, 12.0, 11.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0)
}

/// Returns the numbers of sixteen codes, the lower four bits of words. Codes of a mask have a fifth bit, and numbers of `upper`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn look_up(words: __m512i, fifth: __mmask16, [lower, upper]: [__m512; 2]) -> __m512 {
    // A permutation reads the lower four bits of an index.
    _mm512_mask_permutexvar_ps(_mm512_permutexvar_ps(words, lower), fifth, words, upper)
}

/// Two blocks of 32 codes of four bits or, with `FIFTH`, five. An element is `d q + m` or, without `LEAST`, `d (q - zero)`.
struct Short<const FIFTH: bool, const LEAST: bool>;

impl<const FIFTH: bool, const LEAST: bool> Short<FIFTH, LEAST> {
    const BITS: usize = if LEAST { 4 } else { 2 };
    const CODES: usize = Self::BITS + if FIFTH { 4 } else { 0 };
    const BLOCK: usize = Self::KIND.bytes();
}

impl<const FIFTH: bool, const LEAST: bool> Wide for Short<FIFTH, LEAST> {
    const KIND: BlockKind = match (FIFTH, LEAST) {
        (false, false) => BlockKind::Q4_0,
        (false, true) => BlockKind::Q4_1,
        (true, false) => BlockKind::Q5_0,
        (true, true) => BlockKind::Q5_1,
    };

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn factors(block: *const u8) -> [f32; LANES] {
        let mut factors = [0.0; LANES];
        let second = block.wrapping_add(Self::BLOCK);
        // SAFETY: as the caller says. Without least numbers, the places have other bytes, which are not used.
        let numbers = unsafe { halves([block, second, block.add(2), second.add(2)]) };
        factors[..4].copy_from_slice(&numbers);
        factors
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn elements(block: *const u8, factors: &[f32; LANES], _: usize) -> [__m512; 4] {
        let zero = if LEAST {
            0.0
        } else if FIFTH {
            16.0
        } else {
            8.0
        };
        let mut elements = [_mm512_setzero_ps(); 4];
        for (index, elements) in elements.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let block = block.wrapping_add(Self::BLOCK * index);
            let mut numbers = [codes(), _mm512_add_ps(codes(), _mm512_set1_ps(16.0))];
            for numbers in &mut numbers {
                let centred = _mm512_sub_ps(*numbers, _mm512_set1_ps(zero));
                *numbers = _mm512_mul_ps(_mm512_set1_ps(factors[index]), centred);
                if LEAST {
                    *numbers = _mm512_add_ps(*numbers, _mm512_set1_ps(factors[2 + index]));
                }
            }
            // SAFETY: as the caller says.
            let (words, fifth) = unsafe {
                let bits = block.add(Self::BITS).cast::<u32>();
                (words(block.add(Self::CODES)), if FIFTH { bits.read_unaligned() } else { 0 })
            };
            *elements = [
                look_up(words, fifth as u16, numbers),
                look_up(_mm512_srli_epi32::<4>(words), (fifth >> 16) as u16, numbers),
            ];
        }
        elements
    }
}

/// Two blocks.
struct Q8_0;

impl Wide for Q8_0 {
    const KIND: BlockKind = BlockKind::Q8_0;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn factors(block: *const u8) -> [f32; LANES] {
        let mut factors = [0.0; LANES];
        // SAFETY: as the caller says.
        let scales = unsafe { halves([block, block.add(Self::KIND.bytes())]) };
        factors[..2].copy_from_slice(&scales);
        factors
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn elements(block: *const u8, factors: &[f32; LANES], _: usize) -> [__m512; 4] {
        let mut elements = [_mm512_setzero_ps(); 4];
        for (index, elements) in elements.iter_mut().enumerate() {
            let place = Self::KIND.bytes() * (index / 2) + 2 + LANES * (index % 2);
            // SAFETY: as the caller says.
            let bytes = unsafe { _mm_loadu_si128(block.add(place).cast()) };
            let numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
            *elements = _mm512_mul_ps(numbers, _mm512_set1_ps(factors[index / 2]));
        }
        elements
    }
}

/// A block of 256 codes of four bits or, with `FIFTH`, five.
struct Long<const FIFTH: bool>;

impl<const FIFTH: bool> Wide for Long<FIFTH> {
    const KIND: BlockKind = if FIFTH { BlockKind::Q5K } else { BlockKind::Q4K };

    /// Returns the scales of the eight units, and then their least numbers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn factors(block: *const u8) -> [f32; LANES] {
        // SAFETY: as the caller says.
        let ([scale, least], bytes) =
            unsafe { (halves([block, block.add(2)]), _mm_loadu_si128(block.add(4).cast())) };
        // The six bits of a scale or a least number are in one byte in the first four units. In the others, their lower
        // halves are in the third word, and their upper bits above the six bits of the first four units.
        let own = _mm_shuffle_epi32::<0b01_01_00_00>(bytes);
        let rest = _mm_srlv_epi32(_mm_shuffle_epi32::<0b10_10_10_10>(bytes), _mm_set_epi32(4, 0, 0, 0));
        let upper = _mm_and_si128(_mm_srli_epi32::<2>(own), _mm_set1_epi8(0x30));
        let others = _mm_or_si128(upper, _mm_and_si128(rest, _mm_set1_epi8(0x0f)));
        let six = _mm_blend_epi32::<0b1010>(_mm_and_si128(own, _mm_set1_epi8(0x3f)), others);
        let numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(six));
        let of_halves = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(scale), _mm512_set1_ps(least));
        let mut factors = [0.0; LANES];
        // SAFETY: the factors fill a register.
        unsafe { _mm512_storeu_ps(factors.as_mut_ptr(), _mm512_mul_ps(of_halves, numbers)) };
        factors
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn elements(block: *const u8, factors: &[f32; LANES], step: usize) -> [__m512; 4] {
        let (first, upper) = (2 * step, _mm512_add_ps(codes(), _mm512_set1_ps(16.0)));
        let mut numbers = [[codes(), upper]; 2];
        for (unit, numbers) in (first..).zip(&mut numbers) {
            for numbers in numbers {
                let scaled = _mm512_mul_ps(_mm512_set1_ps(factors[unit]), *numbers);
                *numbers = _mm512_sub_ps(scaled, _mm512_set1_ps(factors[8 + unit]));
            }
        }
        let bytes = block.wrapping_add(if FIFTH { 48 } else { 16 } + 32 * step);
        let mut elements = [_mm512_setzero_ps(); 4];
        for part in 0..2 {
            // SAFETY: as the caller says.
            let (words, fifth) = unsafe {
                let fifth = block.add(16 + LANES * part).cast();
                (
                    words(bytes.add(LANES * part)),
                    if FIFTH { _mm_loadu_si128(fifth) } else { _mm_setzero_si128() },
                )
            };
            let mut masks = [0; 2];
            for (unit, mask) in (first..).zip(&mut masks) {
                *mask = _mm_test_epi8_mask(fifth, _mm_set1_epi8(1 << unit));
            }
            elements[part] = look_up(words, masks[0], numbers[0]);
            elements[2 + part] = look_up(_mm512_srli_epi32::<4>(words), masks[1], numbers[1]);
        }
        elements
    }
}

struct Q6K;

impl Wide for Q6K {
    const KIND: BlockKind = BlockKind::Q6K;

    /// Returns the scales of each sixteen elements.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn factors(block: *const u8) -> [f32; LANES] {
        let mut factors = [0.0; LANES];
        // SAFETY: as the caller says, and the factors fill a register.
        unsafe {
            let [scale] = halves([block.add(208)]);
            let scales = _mm512_cvtepi8_epi32(_mm_loadu_si128(block.add(192).cast()));
            let scaled = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_cvtepi32_ps(scales));
            _mm512_storeu_ps(factors.as_mut_ptr(), scaled);
        }
        factors
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn elements(block: *const u8, factors: &[f32; LANES], step: usize) -> [__m512; 4] {
        let half = step / 2;
        // SAFETY: as the caller says.
        let (lower, upper) = unsafe {
            let lower = _mm512_loadu_si512(block.add(64 * half).cast());
            let upper = _mm256_loadu_si256(block.add(128 + 32 * half).cast());
            (lower, _mm512_broadcast_i64x4(upper))
        };
        // The first half of the register has the quarter before the quarter of the second half.
        let (lower, upper) = if step.is_multiple_of(2) {
            let shifts = _mm512_inserti64x4::<1>(_mm512_set1_epi16(4), _mm256_set1_epi16(2));
            (lower, _mm512_sllv_epi16(upper, shifts))
        } else {
            let shifts = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(2));
            (_mm512_srli_epi16::<4>(lower), _mm512_srlv_epi16(upper, shifts))
        };
        let codes = _mm512_or_si512(
            _mm512_and_si512(lower, _mm512_set1_epi8(15)),
            _mm512_and_si512(upper, _mm512_set1_epi8(0x30)),
        );
        let codes = _mm512_sub_epi8(codes, _mm512_set1_epi8(32));
        let parts = [
            _mm512_castsi512_si128(codes),
            _mm512_extracti32x4_epi32::<1>(codes),
            _mm512_extracti32x4_epi32::<2>(codes),
            _mm512_extracti32x4_epi32::<3>(codes),
        ];
        let mut elements = [_mm512_setzero_ps(); 4];
        for (index, (elements, part)) in elements.iter_mut().zip(parts).enumerate() {
            let numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part));
            *elements = _mm512_mul_ps(_mm512_set1_ps(factors[4 * step + index]), numbers);
        }
        elements
    }
}
