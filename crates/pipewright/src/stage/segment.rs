//! A segment of a stage's module: the whole, one of its blocks, several blocks that follow each other, or one
//! of its layers.

use std::any::Any;
use std::sync::Arc;

use super::body::StageBody;
use super::error::StageError;
use super::module::StageContext;
use crate::tensor::{Values, pack};

/// A function that runs instead of a block of the module.
pub(crate) type Replacement<'a> =
    &'a mut dyn FnMut(&dyn Any, Values, &StageContext) -> Result<Values, StageError>;

/// The whole of a stage's module, or consecutive blocks of it, or a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Segment {
    Whole,
    /// The blocks from `first` to before `end`, out of `of` blocks.
    Blocks {
        first: usize,
        end: usize,
        of: usize,
    },
    /// A layer, which has a tape of its own, out of `of` layers.
    Layer {
        index: usize,
        of: usize,
    },
}

impl Segment {
    /// Returns the block of a module with this number of blocks.
    pub(super) fn block(index: usize, of: usize) -> Self {
        if of > 1 { Self::Blocks { first: index, end: index + 1, of } } else { Self::Whole }
    }

    /// Returns the first `count` of the blocks of a module, and the others; `None` if it has no others.
    pub(super) fn divided(count: usize, of: usize) -> Option<[Self; 2]> {
        let parts = [Self::Blocks { first: 0, end: count, of }, Self::Blocks { first: count, end: of, of }];
        (0 < count && count < of).then_some(parts)
    }

    /// Returns the layers of this segment of `module`, in order; the segment itself if it has no layers.
    pub(super) fn layers<M: StageBody>(self, module: &M) -> impl Iterator<Item = Self> + use<M> {
        let of = module.layers();
        let layers = match self {
            Self::Whole if of > 1 => 0..of,
            // The blocks of such a module are its layers.
            Self::Blocks { first, end, of: blocks } if blocks == of => first..end,
            _ => 0..0,
        };
        let itself = layers.is_empty().then_some(self);
        itself.into_iter().chain(layers.map(move |index| Self::Layer { index, of }))
    }

    /// Returns the name of the layer, or of the part of the stage, for messages.
    pub(super) fn name<M: StageBody>(self, module: &M, context: &StageContext) -> Arc<str> {
        let stage = context.stage();
        let layer = match self {
            Self::Whole if module.layers() == 1 => module.layer_name(0),
            Self::Layer { index, .. } => module.layer_name(index),
            _ => None,
        };
        layer.unwrap_or_else(|| match self {
            Self::Whole => format!("stage {stage}").into(),
            Self::Blocks { first, end, .. } if first + 1 == end => {
                format!("stage {stage}, block {first}").into()
            }
            Self::Blocks { first, end, .. } => format!("stage {stage}, blocks {first} to {}", end - 1).into(),
            Self::Layer { index, .. } => format!("stage {stage}, layer {index}").into(),
        })
    }

    /// Returns the index of the first block or of the layer; 0 for the whole module.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Whole => 0,
            Self::Blocks { first, .. } => first,
            Self::Layer { index, .. } => index,
        }
    }

    /// Returns the block or the layer after this segment.
    pub(super) fn next(self) -> Option<usize> {
        match self {
            Self::Whole => None,
            Self::Blocks { end, of, .. } => (end < of).then_some(end),
            Self::Layer { index, of } => (index + 1 < of).then_some(index + 1),
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
            (None, Self::Blocks { first, end, .. }) => {
                (first..end).try_fold(inputs, |values, block| module.forward_block(block, values, context))
            }
            (None, Self::Layer { index, .. }) => module.forward_layer(index, inputs, context),
        }
    }
}
