//! The forms of blocks of GGUF files of llama.cpp, which have their codes and scales together.
//!
//! A block is 32 or 256 neighbouring elements of a row. Formats and formulas come from `ggml-quants.c` and
//! `gguf-py` of llama.cpp (<https://github.com/ggml-org/llama.cpp>). Numbers are little endian, and `d` and `m` are f16:
//!
//! ```text
//! Q4_0  d, 16 bytes                       d (q - 8); the lower halves of the bytes first, then the upper ones
//! Q4_1  d, m, 16 bytes                    d q + m
//! Q5_0  d, 4 bytes of fifth bits, 16      d (q - 16)
//! Q5_1  d, m, 4, 16                       d q + m
//! Q8_0  d, 32 bytes                       d q
//! Q4_K  d, m, 12 bytes of scales, 128     (d s) q - m t, with six bits for s and t of each 32 elements
//! Q5_K  d, m, 12, 32 of fifth bits, 128   (d s) q - m t
//! Q6_K  128, 64 of upper bits, 16, d      (d s) (q - 32), with eight bits for s of each 16 elements
//! ```

/// The elements that are decoded together. Every block has a multiple of them.
pub(super) const UNIT: usize = 32;

/// The form of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names are those of the files")]
pub enum BlockKind {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl BlockKind {
    /// Returns the elements of a block.
    pub const fn elements(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => UNIT,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Returns the bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Returns the places of the numbers of half precision in a block.
    pub(super) fn halves(self) -> &'static [usize] {
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => &[0],
            Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K => &[0, 2],
            Self::Q6K => &[208],
        }
    }
}
