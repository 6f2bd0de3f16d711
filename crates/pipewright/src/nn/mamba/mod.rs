//! The Mamba-2 mixer (Dao and Gu, 2024): a projection, a short causal convolution, the selective scan, a
//! gated norm, and a projection back.
//!
//! Convolution, scan and norm are one operation: on the CPU back end it keeps its input, the scan's result
//! and the scales of the norm, and computes everything else again in its backward.

#![expect(
    non_snake_case,
    reason = "checkpoints name two parameters with capitals, and Burn makes parameter paths of field names"
)]

mod composed;
mod mixer;
mod operation;
mod cache;

#[cfg(test)]
mod tests;

pub use cache::MambaCache;
pub(super) use composed::{CHUNK, Masks, convolve};
pub use mixer::{DepthwiseConvolution, GroupNormWeight, Mamba2, MambaScan, MambaSizes};
