//! The layout of a product's weight.

use super::matrix::Operand;
use super::operation::CpuTensor;

/// How a product uses its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// `x w`, with `w [inputs, outputs]`.
    Plain,
    /// `x wᵀ`, with `w [outputs, inputs]`.
    Transposed,
}

impl Layout {
    /// Returns the weight as the matrix `[inputs, outputs]` by which `x` is multiplied.
    pub(super) fn factor(self, weight: &CpuTensor, shape: [usize; 2]) -> Operand<'_> {
        let operand = Operand::new(weight, shape);
        match self {
            Self::Plain => operand,
            Self::Transposed => operand.transposed(),
        }
    }

    /// Returns the number of outputs of a weight of this shape.
    pub(super) fn outputs(self, [rows, columns]: [usize; 2]) -> usize {
        match self {
            Self::Plain => columns,
            Self::Transposed => rows,
        }
    }

    /// Returns `a` and `b` such that the weight's gradient is `aᵀ b`.
    pub(super) fn gradient_factors<T>(self, x: T, gradient: T) -> (T, T) {
        match self {
            Self::Plain => (x, gradient),
            Self::Transposed => (gradient, x),
        }
    }
}
