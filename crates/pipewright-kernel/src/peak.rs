//! The highest rate of multiplications and additions that this processor's instructions reach on registers.
//! Benches compare products with it, and runs compare their steps with it.

#[cfg(target_arch = "x86_64")]
use crate::bf16_product::{Instruction, REGISTERS, instruction, multiply_registers};

/// Multiplies and adds numbers in single precision, `rounds` times in each of several registers. Returns the
/// number of operations, a multiplication and an addition counting as two; `None` on a processor with neither
/// AVX-512 nor FMA.
pub fn run_single(rounds: usize) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the instructions.
        unsafe { instructions::multiply_single(rounds) };
        return Some((rounds * instructions::SUMS * 16 * 2) as f64);
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the instructions.
        unsafe { instructions::multiply_single_by_8(rounds) };
        return Some((rounds * instructions::SUMS_BY_8 * 8 * 2) as f64);
    }
    let _ = rounds;
    None
}

/// Like [`run_single`], but for pairs of bfloat16, with the instruction of their products
/// ([`bf16_product`](crate::bf16_product)); `None` on a processor without it.
pub fn run_bf16(rounds: usize) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    return Some(match instruction()? {
        Instruction::Avx512Bf16 => {
            // SAFETY: the processor has the instructions.
            unsafe { instructions::multiply_bf16(rounds) };
            (rounds * instructions::SUMS * 32 * 2) as f64
        }
        Instruction::Amx => {
            // SAFETY: the process may use the instructions, and computes no product here.
            unsafe { multiply_registers(rounds) };
            // Each instruction adds 16 pairs to each of 16 x 16 sums.
            (rounds * REGISTERS * 16 * 16 * 32 * 2) as f64
        }
    });
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = rounds;
        None
    }
}

#[cfg(target_arch = "x86_64")]
mod instructions {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Independent sums: more than the cycles that an instruction takes times the instructions that start in a
    /// cycle.
    pub(super) const SUMS: usize = 24;

    #[target_feature(enable = "avx512f")]
    pub(super) fn multiply_single(rounds: usize) {
        let [a, b] = [0.5, 0.25].map(|x| _mm512_set1_ps(black_box(x)));
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(a, b, *sum);
            }
        }
        black_box(sums);
    }

    /// Like [`SUMS`], and few enough for 16 registers.
    pub(super) const SUMS_BY_8: usize = 12;

    #[target_feature(enable = "avx,fma")]
    pub(super) fn multiply_single_by_8(rounds: usize) {
        let [a, b] = [0.5, 0.25].map(|x| _mm256_set1_ps(black_box(x)));
        let mut sums = [_mm256_setzero_ps(); SUMS_BY_8];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(a, b, *sum);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn multiply_bf16(rounds: usize) {
        let [a, b] = [0.5, 0.25].map(|x| _mm512_cvtneps_pbh(_mm512_set1_ps(black_box(x))));
        // Two halves that are equal.
        let [a, b] = [a, b].map(|half| {
            // SAFETY: the types have the same bits.
            unsafe {
                let half = std::mem::transmute::<__m256bh, __m256i>(half);
                std::mem::transmute::<__m512i, __m512bh>(_mm512_broadcast_i64x4(half))
            }
        });
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }
}
