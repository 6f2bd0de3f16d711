//! A segment of a stage's module: the whole, or one of its blocks.

use std::any::Any;

use super::body::StageBody;
use super::error::StageError;
use super::module::StageContext;
use crate::tensor::{Values, pack};

/// A function that runs instead of a block of the module.
pub(crate) type Replacement<'a> =
    &'a mut dyn FnMut(&dyn Any, Values, &StageContext) -> Result<Values, StageError>;

/// The whole of a stage's module, or a block of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Segment {
    Whole,
    Block { index: usize, of: usize },
}

impl Segment {
    /// Returns the block of a module with this number of blocks.
    pub(super) fn block(index: usize, of: usize) -> Self {
        if of > 1 { Self::Block { index, of } } else { Self::Whole }
    }

    /// Returns the index of the block; 0 for the whole module.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Whole => 0,
            Self::Block { index, .. } => index,
        }
    }

    /// Returns the block after this segment.
    pub(super) fn next(self) -> Option<usize> {
        match self {
            Self::Whole => None,
            Self::Block { index, of } => (index + 1 < of).then_some(index + 1),
        }
    }

    pub(super) fn is_last(self) -> bool {
        self.next().is_none()
    }

    /// Runs the segment of `module`, or `replacement` in its place.
    pub(super) fn forward<M: StageBody>(
        self,
        module: &M,
        inputs: Values,
        context: &StageContext,
        replacement: Option<Replacement<'_>>,
    ) -> Result<Values, StageError> {
        match (replacement, self) {
            (Some(replacement), _) => {
                let name = format!("stage {}, block {}, replaced", context.stage(), self.index());
                context.run_layer(&name, || replacement(module.exposed(), inputs, context))?
            }
            (None, Self::Whole) => Ok(pack(module.forward(inputs, context)?)),
            (None, Self::Block { index, .. }) => module.forward_block(index, inputs, context),
        }
    }
}
