//! The right operand of a product: a matrix of bfloat16, or a quantised one, which is decoded as it is packed.

use std::cell::RefCell;

use half::bf16;

use super::pack::Vectors;
use crate::product::Matrix;
use crate::quantised::QuantisedOperand;

/// The elements of a vector that are decoded at once. With the width of a panel they stay in a first-level
/// cache until they are packed. A multiple of the pairs that any instruction takes at once.
const DECODED: usize = 256;

thread_local! {
    /// Decoded elements, which a thread keeps for its next panel.
    static ROOM: RefCell<Vec<bf16>> = const { RefCell::new(Vec::new()) };
}

/// The right operand of a product.
#[derive(Clone, Copy)]
pub(super) enum Right<'a> {
    Held(Matrix<'a, bf16>),
    Quantised(QuantisedOperand<'a>),
}

/// The right operand as vectors along the inner dimension.
#[derive(Clone, Copy)]
pub(super) enum PackedRight<'a> {
    Held(Vectors<'a>),
    Quantised {
        operand: QuantisedOperand<'a>,
        /// The pairs that the instruction takes at once.
        at_once: usize,
    },
}

impl<'a> Right<'a> {
    pub(super) fn inner(self) -> usize {
        match self {
            Self::Held(matrix) => matrix.rows,
            Self::Quantised(operand) => operand.inner(),
        }
    }

    pub(super) fn columns(self) -> usize {
        match self {
            Self::Held(matrix) => matrix.columns,
            Self::Quantised(operand) => operand.columns(),
        }
    }

    /// Returns the columns, for an instruction that multiplies `at_once` pairs of each.
    pub(super) fn packed(self, at_once: usize) -> PackedRight<'a> {
        match self {
            Self::Held(matrix) => PackedRight::Held(Vectors::columns_of(matrix, at_once)),
            Self::Quantised(operand) => PackedRight::Quantised { operand, at_once },
        }
    }
}

impl PackedRight<'_> {
    /// Returns the number of vectors.
    pub(super) fn count(self) -> usize {
        match self {
            Self::Held(vectors) => vectors.count,
            Self::Quantised { operand, .. } => operand.columns(),
        }
    }

    /// Packs the vectors from `first` on, at most `width`, like [`Vectors::pack`].
    ///
    /// # Safety
    /// As [`Vectors::pack`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn pack(self, first: usize, width: usize, into: *mut u32) {
        let (operand, at_once) = match self {
            // SAFETY: as the caller says.
            Self::Held(vectors) => return unsafe { vectors.pack(first, width, into) },
            Self::Quantised { operand, at_once } => (operand, at_once),
        };
        ROOM.with_borrow_mut(|room| {
            room.resize(width * DECODED, bf16::ZERO);
            for start in (0..operand.inner()).step_by(DECODED) {
                let depth = DECODED.min(operand.inner() - start);
                let panel = operand.panel([first, width], [start, depth], room, false);
                // SAFETY: the pairs of this part follow the pairs of the parts before it. The processor has the
                // instructions.
                unsafe { Vectors::columns_of(panel, at_once).pack(0, width, into.add(start / 2 * width)) };
            }
        });
    }

    /// Like [`Vectors::prefetch`]. A quantised operand is small.
    pub(super) fn prefetch(self, first: usize, count: usize, part: usize, parts: usize) {
        if let Self::Held(vectors) = self {
            vectors.prefetch(first, count, part, parts);
        }
    }
}
