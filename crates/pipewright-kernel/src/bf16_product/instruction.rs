//! The instructions for products of bfloat16.

use std::fmt;

#[cfg(target_arch = "x86_64")]
use super::{amx, tile};

/// An instruction that multiplies pairs of bfloat16 and adds the products in single precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// `vdpbf16ps` of AVX512-BF16: it adds a pair to each of 16 sums.
    Avx512Bf16,
    /// `tdpbf16ps` of AMX: it adds 16 pairs to each of 16 x 16 sums.
    Amx,
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Avx512Bf16 => "AVX512-BF16",
            Self::Amx => "AMX",
        })
    }
}

/// How the instruction divides a product.
#[cfg(target_arch = "x86_64")]
impl Instruction {
    /// Rows of a panel of the left operand.
    pub(super) fn panel_rows(self) -> usize {
        match self {
            Self::Avx512Bf16 => tile::ROWS,
            Self::Amx => amx::ROWS,
        }
    }

    /// Returns the rows of a packed left operand of `rows` rows. Rows after the last one are zero.
    pub(super) fn packed_rows(self, rows: usize) -> usize {
        match self {
            Self::Avx512Bf16 => rows,
            Self::Amx => rows.next_multiple_of(amx::SIDE),
        }
    }

    /// Pairs of the inner dimension that are multiplied at once. The packed operands have a multiple of them;
    /// pairs after the last one are zero.
    pub(super) fn pairs_at_once(self) -> usize {
        match self {
            Self::Avx512Bf16 => 1,
            Self::Amx => amx::SIDE,
        }
    }
}
