//! Matrix products of bfloat16 operands with sums in single precision, by the instruction `vdpbf16ps` of
//! AVX512-BF16 or `tdpbf16ps` of AMX. The first multiplies 32 pairs of elements at once and adds each two
//! neighbouring products to a sum in single precision: twice the rate of products in single precision. The
//! second multiplies two tiles of 16 x 16 pairs. A process uses AMX if the processor has it and Linux permits
//! it. Other operating systems are not asked.
//!
//! ```text
//! left   [rows, inner]     packed in panels of 14 rows:    for each pair of the inner dimension, a word per row
//!                          AMX: in panels of 32 rows:      for each 16 rows and 16 pairs, 16 words per row
//! right  [inner, columns]  packed in panels of 32 columns: for each pair of the inner dimension, a word per column
//! tile   14 x 32 sums in registers, over the whole inner dimension; AMX: 32 x 32 sums
//! ```
//!
//! A word holds two neighbouring elements of the inner dimension. Packing reads operands in either
//! orientation, so no product needs a transposed copy: `x w`, `g wᵀ` and `xᵀ g` read `x`, `w` and `g` as they
//! are. For AMX, it adds zeros up to a multiple of 16 pairs.
//!
//! With AVX512-BF16, products of up to 16 rows read a right operand whose rows are neighbours as it is, pair by pair of its rows,
//! and keep the sums of many columns in a first-level cache.
//!
//! Other products pack their operands. A step multiplies a weight twice per microbatch, so its packed forms
//! could be kept until the update, one for `x w` and one for `g wᵀ`. They would need 4 bytes per parameter,
//! in addition to the 18 of parameter, gradient, two moments of AdamW and copy in bfloat16. Packing the right
//! operand takes a thirteenth of a product of 256 rows and a quarter of one of 64 rows, some of it for reads
//! that would remain (processor time of one thread on a virtual AMD EPYC with AVX512-BF16). That is at most
//! 4 % of a step of the bench model, and 13 % with experts that have 64 rows each. It is not worth a fifth more
//! memory. With AMX, packing takes a larger part of a product, because the rest takes up to eight times less.
//! This has not been measured.
//!
//! # Bits
//!
//! Each element of a result is one sum in the order of the inner dimension, whatever the sizes, the number of
//! threads and the position of the element. So a row has the same bits in every product with the same right
//! operand. The instruction adds first the odd and then the even element of a pair, and rounds each sum to the
//! nearest number, ties to even. It ignores the processor's rounding mode. Subnormal operands and results count
//! as zero (Intel's Instruction Set Extensions Programming Reference, `VDPBF16PS`). The products are not rounded, and a sum is
//! subnormal if it is below the least normal number after it has been rounded to 24 bits with an exponent of any size; so an AMD
//! EPYC (Zen 5) computes them. A zero has the sign of the number that it replaces. Infinities and NaN are as in single precision.
//! [`add_product`] adds the finished sum to the old value. `sum_of_pairs` of [`product`](crate::product) has these sums in
//! scalar code.
//!
//! AMX has another order. It adds the products of up to 16 pairs from zero on, in one sum for even elements
//! and one for odd elements. Then it adds the two sums, and adds the result to the sum of the pairs
//! before. Rounding is as above (Intel's Software Developer's Manual, volume 2, `TDPBF16PS`). Each 16 pairs
//! begin at a multiple of 32 elements of the inner dimension, so a row has the same bits in every product
//! with AMX too.
//!
//! On a processor without these instructions, operands are widened and multiplied in single precision by the kernels of
//! [`product`](crate::product), in the order of AVX512-BF16 and with the same bits. If numbers of the operands are so small that
//! a sum may be subnormal, each sum is compared with the least normal number.
//!
//! # Why not a library
//!
//! The `gemm` crate has no products of bfloat16. oneDNN has them, and is a library in C++ that every build would need.

#[cfg(target_arch = "x86_64")]
mod pack;
#[cfg(target_arch = "x86_64")]
mod tile;
#[cfg(target_arch = "x86_64")]
mod right;
#[cfg(target_arch = "x86_64")]
mod amx;
mod instruction;
#[cfg(target_arch = "x86_64")]
mod available;
#[cfg(target_arch = "x86_64")]
mod blocked;
#[cfg(target_arch = "x86_64")]
mod few_rows;
pub(crate) mod widened;
mod functions;

#[cfg(feature = "testing")]
pub use crate::testing;
#[cfg(target_arch = "x86_64")]
pub(crate) use amx::{REGISTERS, multiply_registers};
pub use functions::{
    add_product, instruction, leave_out_amx, product, product_in_single, product_into, product_with_update,
    rounded_product_into,
};
pub(crate) use functions::{quantised_product, quantised_product_into};
pub use instruction::Instruction;
