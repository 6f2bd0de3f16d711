//! Matrix products in single precision, with kernels for AVX-512, AVX2, NEON and other processors.
//!
//! ```text
//! left   [rows, inner]     packed in panels of up to 14 rows: for each element of the inner dimension, one per row
//! right  [inner, columns]  packed in panels of 32 columns:    for each element of the inner dimension, one per column
//! tile   14 x 32 sums in registers, over a block of the inner dimension; AVX2: 6 x 16, NEON: 8 x 12
//! ```
//!
//! # Bits
//!
//! Every element of a result has the same bits on every processor, for all sizes, strides, numbers of threads and places in
//! the result. `definition` has these sums in scalar code:
//!
//! - The inner dimension is cut into blocks of 512 elements. The last may be shorter.
//! - The sum of a block begins with zero. Its products are added in ascending order, each by a fused
//!   multiplication and addition, which rounds once.
//! - The result is the sum of the first block, to which the sums of the others are added in ascending order. A product that is
//!   added to existing values begins with these values, and adds the sums of all blocks.
//!
//! Rounding is to the nearest number, ties to even. Subnormal numbers, infinities and signs of zeros are as IEEE 754 says. If a
//! result is NaN, it may be any NaN.
//!
//! Registers hold neighbouring columns of the result, so that their width has no part in the order. Blocks for caches and
//! threads divide the result, or follow the blocks above.

mod definition;
mod matrix;
mod vector;
mod request;
mod tile;
mod pack;
mod kernel;
mod blocks;
mod blocked;
mod few_rows;
mod functions;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub(crate) use blocks::{Block, blocks, panels_in_cache};
#[cfg(test)]
pub(crate) use definition::sum_of_pairs;
pub(crate) use definition::{BLOCK, flushed};
#[cfg(target_arch = "x86_64")]
pub(crate) use few_rows::each_strip;
pub use functions::{add_product, product, product_into};
pub(crate) use functions::{join, new_memory};
#[cfg(test)]
pub(crate) use matrix::PARALLEL_FROM;
#[cfg(target_arch = "x86_64")]
pub(crate) use matrix::product_size;
pub use matrix::{Matrix, Sums};
pub(crate) use matrix::{assert_fits, is_parallel};
#[cfg(target_arch = "x86_64")]
pub(crate) use request::{LineRequests, prefetch_runs};
pub(crate) use tile::{Join, Order};
#[cfg(target_arch = "x86_64")]
pub(crate) use vector::{avx512::transpose, prefetch};
