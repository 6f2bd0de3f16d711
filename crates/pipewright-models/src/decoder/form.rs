//! The form of a family's blocks: the parts in which they differ between families.

use super::mixture::MixtureConfig;
use crate::attention::AttentionBias;

/// The parts of a block in which families differ.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockForm<'a> {
    /// The linear layers of the attention that have a bias.
    pub bias: AttentionBias,
    /// Whether the three linear layers of a dense feed-forward layer have a bias.
    pub mlp_bias: bool,
    /// Whether each head's queries and keys go through a normalisation before the rotation.
    pub normalises_heads: bool,
    /// The experts, in a family that has them.
    pub mixture: Option<&'a MixtureConfig>,
}

impl<'a> BlockForm<'a> {
    /// Returns the experts of layer `index`, counted from 0; `None` if its feed-forward layer is dense.
    pub(super) fn mixture_of(&self, index: usize) -> Option<&'a MixtureConfig> {
        self.mixture.filter(|mixture| mixture.is_sparse(index))
    }

    /// Returns the share of each layer's balance loss in the model's, which is the mean over the `layers`
    /// that have experts.
    pub(super) fn balance_share(&self, layers: usize) -> f64 {
        let sparse = (0..layers).filter(|&index| self.mixture_of(index).is_some()).count();
        1.0 / sparse.max(1) as f64
    }
}
