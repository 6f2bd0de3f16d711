//! How the ranks of a tensor group hold a tensor that goes from one stage to another.
//!
//! A module names the placement of each of its inputs and outputs
//! ([`StageModule::input_placement`](crate::stage::StageModule::input_placement),
//! [`StageModule::output_placement`](crate::stage::StageModule::output_placement)). The two sides of a boundary may
//! name different ones: the executor converts the tensor on its way, and its gradient on the way back
//! (`executor/conversion.rs`).
//!
//! ```
//! use pipewright::tensor::{EdgePlacement, Spread};
//!
//! // Each rank has its share of the tokens in `[rows, tokens, width]`, and returns the gradient of its share.
//! let shares = EdgePlacement::split(1);
//! assert_eq!(shares.tensor, Spread::Split { dimension: 1 });
//! // Each rank takes the whole tensor, and returns what its own layers contribute to the gradient.
//! let entered = EdgePlacement::WHOLE.with_gradient(Spread::Partial);
//! assert_eq!((entered.tensor, entered.gradient), (Spread::Whole, Spread::Partial));
//! ```

use std::fmt;

/// How the ranks of a tensor group hold a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Spread {
    /// Every rank has the whole tensor, with equal elements.
    #[default]
    Whole,
    /// Each rank has a part along this dimension, in the order of the ranks. Between two stages, the parts are
    /// equally long.
    Split {
        /// The dimension.
        dimension: usize,
    },
    /// Every rank has a tensor of the whole shape, and the sum of these is the tensor. It has floats. Of a gradient,
    /// either every rank has one or none has.
    Partial,
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole on every rank"),
            Self::Split { dimension } => write!(f, "split along dimension {dimension}"),
            Self::Partial => f.write_str("a partial sum on every rank"),
        }
    }
}

/// How a stage takes or returns a tensor, and how it returns or takes the tensor's gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct EdgePlacement {
    /// The tensor.
    pub tensor: Spread,
    /// The gradient: of an input as the stage computes it, of an output as the stage needs it.
    pub gradient: Spread,
}

impl EdgePlacement {
    /// Every rank has the whole tensor and the whole gradient.
    pub const WHOLE: Self = Self { tensor: Spread::Whole, gradient: Spread::Whole };

    /// Each rank has a part of the tensor along `dimension`, and the same part of the gradient.
    pub const fn split(dimension: usize) -> Self {
        let part = Spread::Split { dimension };
        Self { tensor: part, gradient: part }
    }

    /// Returns the same placement of the tensor with another one of the gradient.
    #[must_use]
    pub const fn with_gradient(self, gradient: Spread) -> Self {
        Self { gradient, ..self }
    }
}
