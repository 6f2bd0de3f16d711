//! The right operand of a product: a matrix of bfloat16, or a quantised one, which is decoded as it is packed.

use std::cell::RefCell;
use std::ops::Range;

use half::bf16;

use super::pack::Vectors;
use super::tile::COLUMNS;
use crate::product::{LineRequests, Matrix};
use crate::quantised::QuantisedOperand;

/// The elements of a vector that are decoded at once. With the width of a panel they stay in a first-level
/// cache until they are packed.
const DECODED: usize = 256;

/// The fewest of them if several panels are decoded together: the elements that any instruction takes at once.
const LEAST_DEPTH: usize = 32;

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

    /// Returns the panels that are packed together.
    pub(super) fn at_once(self) -> usize {
        match self {
            Self::Quantised { operand, .. } => {
                (operand.neighbours() / COLUMNS).clamp(1, DECODED / LEAST_DEPTH)
            }
            Self::Held(_) => 1,
        }
    }

    /// Packs panels of `width` vectors like [`Vectors::pack`], one after the other. A vector has `pairs` pairs.
    ///
    /// # Safety
    /// `into` must point to memory for `pairs * width` words for each panel, on a processor with the instructions.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn pack(self, panels: Range<usize>, width: usize, pairs: usize, into: *mut u32) {
        let (operand, at_once) = match self {
            Self::Held(vectors) => {
                for (index, panel) in panels.enumerate() {
                    // SAFETY: as the caller says.
                    unsafe { vectors.pack(panel * width, width, into.add(index * width * pairs)) };
                }
                return;
            }
            Self::Quantised { operand, at_once } => (operand, at_once),
        };
        let most = self.at_once();
        ROOM.with_borrow_mut(|room| {
            room.resize(width * DECODED, bf16::ZERO);
            for group in panels.clone().step_by(most) {
                let count = most.min(panels.end - group);
                let at_a_time = DECODED / count / LEAST_DEPTH * LEAST_DEPTH;
                for start in (0..operand.inner()).step_by(at_a_time) {
                    let depth = at_a_time.min(operand.inner() - start);
                    let panel = operand.panel([group * width, count * width], [start, depth], room, false);
                    for index in 0..count {
                        let place = ((group - panels.start + index) * pairs + start / 2) * width;
                        let vectors = Vectors::columns_of(panel, at_once);
                        // SAFETY: the pairs of this part follow the pairs of the parts before it, in the words of its panel. The
                        // processor has the instructions.
                        unsafe { vectors.pack(index * width, width, into.add(place)) };
                    }
                }
            }
        });
    }

    /// Like [`Vectors::request`]; `None` for a quantised operand, which is small.
    pub(super) fn request(self, vectors: [usize; 2], part: [usize; 2], steps: usize) -> Option<LineRequests> {
        match self {
            Self::Held(held) => Some(held.request(vectors, part, steps)),
            Self::Quantised { .. } => None,
        }
    }
}
