//! The layers of a stage. In every family, the first layer of the model is the embeddings, one layer for each
//! block follows, and the last layer is the last norm with the head.

use std::ops::Range;

use crate::error::ConfigError;

/// A layer of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layer {
    /// The embeddings.
    Embedding,
    /// A block, by its index in the whole model.
    Block(usize),
    /// The last norm and the head.
    Head,
}

/// Returns the layers that a stage has, in order. `blocks` has an entry for each block of the whole model.
pub(crate) fn held_layers<Block>(
    has_embedding: bool,
    blocks: &[Option<Block>],
    has_head: bool,
) -> Vec<Layer> {
    let embedding = has_embedding.then_some(Layer::Embedding);
    let held = (0..blocks.len()).filter(|&index| blocks[index].is_some()).map(Layer::Block);
    embedding.into_iter().chain(held).chain(has_head.then_some(Layer::Head)).collect()
}

/// Returns the layers of the stage that holds `range` in a model with this number of blocks, in order.
///
/// # Errors
/// When the range is empty or reaches past the last layer.
pub(crate) fn stage_layers(
    range: Range<usize>,
    blocks: usize,
) -> Result<impl Iterator<Item = Layer>, ConfigError> {
    let (Range { start, end }, layers) = (range, blocks + 2);
    if start >= end || end > layers {
        return Err(ConfigError::LayerRange { start, end, layers });
    }
    Ok((start..end).map(move |layer| match layer {
        0 => Layer::Embedding,
        layer if layer + 1 == layers => Layer::Head,
        layer => Layer::Block(layer - 1),
    }))
}
