//! Registers of single precision, for the code that all kernels of products share.
//!
//! The functions have no target features of their own: they are inlined into functions that have them.

mod register;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use std::arch::x86_64::{__m256 as Avx2, __m512 as Avx512};

#[cfg(target_arch = "aarch64")]
pub(super) use std::arch::aarch64::float32x4_t as Neon;

pub(super) use portable::Portable;
pub(crate) use register::prefetch;
pub(super) use register::{Vector, prefetch_second};
