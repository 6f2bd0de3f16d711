//! The parameters of a block that are trained: all, or the matrices of adapters (LoRA, arXiv 2106.09685, and DoRA,
//! arXiv 2402.09353).
//!
//! An adapter adds two products to a linear layer: with `A [inputs, rank]` and `B [rank, outputs]`. The
//! layer's own matrix is frozen: it has no gradient and no optimizer state, and its backward computes the
//! gradient of its inputs alone. Blocks before all adapters run forward only. The ranks of a tensor group
//! divide the adapter of a layer as they divide the layer: `B` by outputs, or `A` by inputs; the other matrix
//! is whole on each rank.

use thiserror::Error;

use crate::matrix::{Division, Matrix};

/// The most layers of a block that have an adapter: five of a latent attention, and three of a feed-forward
/// part.
const MOST_LAYERS: usize = 8;

/// The parameters of a block that are trained, which decide what its backward computes.
#[expect(
    clippy::large_enum_variant,
    reason = "a model has few kinds of blocks, and copies are simpler than boxes"
)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Training {
    /// All parameters.
    #[default]
    Whole,
    /// The parameters of adapters. A block without adapters only computes the gradient of its input.
    Adapters(Adapters),
    /// No parameters. The block is before the first adapter, so it has no backward.
    ForwardOnly,
}

/// The adapters of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adapters {
    sizes: AdapterSizes,
    layers: [Option<AdaptedLayer>; MOST_LAYERS],
}

/// A linear layer with an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdaptedLayer {
    /// The width of its input.
    pub input: u64,
    /// The width of its output.
    pub output: u64,
    /// How the ranks of a tensor group divide it.
    pub division: Division,
    /// Whether an earlier layer of the block has the same input, as keys and values have that of queries.
    pub shares_input: bool,
}

/// The settings of adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterSizes {
    /// The rank.
    pub rank: u64,
    /// Whether each output has a magnitude, as in DoRA.
    pub has_magnitudes: bool,
    /// Whether elements of the inputs are dropped. Each adapter then drops its own elements, and tensor
    /// groups are not possible.
    pub has_dropout: bool,
}

/// Adapters that do not fit a model.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum AdapterError {
    /// No layer has an adapter.
    #[error("no layer of the model has an adapter; name at least one")]
    NoLayer,
    /// The model has fewer blocks.
    #[error("block {block} has an adapter, and the model has {blocks} blocks")]
    Block {
        /// The index of the block.
        block: usize,
        /// The number of blocks.
        blocks: usize,
    },
    /// A block has too many layers.
    #[error("block {block} has more than {MOST_LAYERS} layers with an adapter; adapt fewer of them")]
    Layers {
        /// The index of the block.
        block: usize,
    },
}

pipewright_schedule::message_as_debug!(AdapterError);

impl Training {
    /// Returns the operations per parameter and token of a block's own products: 2 in the forward, 2 for the
    /// gradients of inputs, and 2 for the gradients of weights.
    pub fn operations_per_parameter(&self) -> f64 {
        match self {
            Self::Whole => 6.0,
            Self::Adapters(_) => 4.0,
            Self::ForwardOnly => 2.0,
        }
    }
}

impl Adapters {
    /// Returns adapters on no layer yet.
    pub fn none(sizes: AdapterSizes) -> Self {
        Self { sizes, layers: [None; MOST_LAYERS] }
    }

    /// Adds an adapter on a layer. Returns whether there is room for it.
    pub fn add(&mut self, layer: AdaptedLayer) -> bool {
        // With dropout, no two adapters have the same input.
        let shares_input = layer.shares_input && !self.sizes.has_dropout;
        let free = self.layers.iter_mut().find(|slot| slot.is_none());
        free.map(|slot| *slot = Some(AdaptedLayer { shares_input, ..layer })).is_some()
    }

    /// Returns the layers with an adapter.
    pub fn layers(&self) -> impl Iterator<Item = AdaptedLayer> {
        self.layers.into_iter().flatten()
    }

    /// Returns the settings.
    pub fn sizes(&self) -> AdapterSizes {
        self.sizes
    }

    /// Returns both matrices of the adapter of each layer.
    pub fn matrices(&self) -> impl Iterator<Item = Matrix> {
        let rank = self.sizes.rank;
        self.layers().flat_map(move |layer| {
            let divided = |division| if layer.division == division { division } else { Division::Whole };
            let matrix = |input, output, division| Matrix { input, output, division, of_experts: None };
            [
                matrix(layer.input, rank, divided(Division::Rows)),
                matrix(rank, layer.output, divided(Division::Columns)),
            ]
        })
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> u128 {
        let AdapterSizes { rank, has_magnitudes, .. } = self.sizes;
        let magnitudes = u128::from(has_magnitudes);
        self.layers()
            .map(|AdaptedLayer { input, output, .. }| {
                u128::from(rank) * u128::from(input + output) + u128::from(output) * magnitudes
            })
            .sum()
    }
}
