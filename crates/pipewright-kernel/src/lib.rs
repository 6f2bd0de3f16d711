//! Arithmetic of the CPU back end on slices of `f32`, in one pass over memory where Burn composes several,
//! and conversion between `f32` and half precision. Some operations also read and write bfloat16
//! ([`element::Element`]); their arithmetic is in single precision.
//!
//! This crate does not depend on tensors, tapes or stages; `pipewright::nn` puts these functions on Burn's
//! tape. It is a crate of its own so that builds for tests optimise the arithmetic and not what calls it.
//!
//! Vector instructions are chosen at run time. No result depends on which were chosen: sums run over a fixed
//! number of lanes, no multiplication is contracted with an addition, and rounding to bfloat16 keeps
//! subnormal numbers. Functions such as exponentials do not call the system's C library ([`pointwise`]).
//! Matrix products have an order of their own, with contracted multiplications, on every processor
//! ([`product`]). Products of bfloat16 with AMX are the exception: AMX has another order ([`bf16_product`]).
//!
//! # Panics
//!
//! Functions panic if the lengths of their slices do not fit together. The layers that call them compare
//! shapes first.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[cfg(test)]
mod numbers;
#[cfg(feature = "testing")]
pub mod testing;
mod simd;
mod rounding;
#[cfg(target_arch = "x86_64")]
mod bf16_instructions;
pub mod half;
mod exp;
pub mod pointwise;
pub mod rows;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scratch;
pub use scratch::KEPT_BYTES;
pub mod threads;
pub mod product;
pub mod narrow_product;
pub mod quantised;
pub mod bf16_product;
pub mod quantised_product;
pub mod element;
pub mod adamw;
pub mod adamw8bit;
pub mod lion;
pub mod squares;
pub mod scale;
pub mod hash;
pub mod addition;
pub mod rms_norm;
pub mod gated_norm;
pub mod relu_squared;
pub mod swiglu;
pub mod clamped_gate;
pub mod cross_entropy;
pub mod vocabulary_part;
mod rotary;
mod soft_cap;
pub mod attention;
pub mod cached_attention;
pub mod convolution;
pub mod routing;
pub mod router_losses;
pub mod grouped;
pub mod scan;
pub mod mamba;
pub mod delta;
pub mod peak;
