//! Sums of two slices, element by element. Each sum is rounded once.

use std::mem::MaybeUninit;

use half::bf16;
use multiversion::multiversion;

#[cfg(target_arch = "x86_64")]
use super::bf16_instructions::Instructions;
use super::rounding::{narrow, widen};
use super::simd::{fresh, written};

/// Returns `a + b`. Both have the same length.
pub fn add_bf16(a: &[bf16], b: &[bf16]) -> Vec<bf16> {
    assert_eq!(a.len(), b.len(), "both have the same length");
    let mut sums = fresh(a.len());
    write_sums(a, b, &mut sums);
    // SAFETY: all sums were written: they are as many as the elements of `a`.
    unsafe { written(sums) }
}

fn write_sums(a: &[bf16], b: &[bf16], sums: &mut [MaybeUninit<bf16>]) {
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = Instructions::detect() {
        return instructions.add(a, b, sums);
    }
    write_each(a, b, sums);
}

#[multiversion(targets = "simd")]
fn write_each(a: &[bf16], b: &[bf16], sums: &mut [MaybeUninit<bf16>]) {
    for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
        sum.write(narrow(widen(a) + widen(b)));
    }
}

/// Adds the elements of `other` to the elements of `sums`. Both have the same length.
pub fn add_assign_bf16(sums: &mut [bf16], other: &[bf16]) {
    assert_eq!(sums.len(), other.len(), "both have the same length");
    #[cfg(target_arch = "x86_64")]
    if let Some(instructions) = Instructions::detect() {
        return instructions.add_assign(sums, other);
    }
    add_to_each(sums, other);
}

#[multiversion(targets = "simd")]
fn add_to_each(sums: &mut [bf16], other: &[bf16]) {
    for (sum, &other) in sums.iter_mut().zip(other) {
        *sum = narrow(widen(*sum) + widen(other));
    }
}
