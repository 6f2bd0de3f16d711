//! The parameters and sizes of a delta rule with its convolution.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright_kernel::{convolution, delta};

use super::super::mamba::DepthwiseConvolution;

/// The parameters between the projections, named and shaped as checkpoints name and shape them.
#[derive(Module, Debug)]
pub struct DeltaRule {
    /// The convolution of queries, keys and values, without a bias.
    pub conv1d: DepthwiseConvolution,
    /// Added to the raw decays before the softplus, `[value_heads]`.
    pub dt_bias: Param<Tensor<1>>,
    /// The logarithm of each head's rate of decay, `[value_heads]`.
    pub A_log: Param<Tensor<1>>,
    /// Sizes.
    #[module(skip)]
    pub sizes: DeltaSizes,
}

/// Sizes of a delta rule with its convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSizes {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values; neighbours share the queries and keys of a head.
    pub value_heads: usize,
    /// Channels of a query or a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// Tokens that the convolution sees.
    pub taps: usize,
}

impl DeltaSizes {
    /// Returns the channels of all queries, all keys and all values.
    pub fn channels(&self) -> usize {
        self.rule(1).channels()
    }

    /// Returns the channels of all values.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    pub(super) fn rule(&self, sequence: usize) -> delta::Dims {
        let Self { key_heads, value_heads, key_dim, value_dim, .. } = *self;
        delta::Dims { sequence, key_heads, value_heads, key_dim, value_dim }
    }

    pub(super) fn convolution(&self, sequence: usize) -> convolution::Dims {
        let channels = self.channels();
        convolution::Dims { sequence, channels, taps: self.taps, stride: channels, start: 0 }
    }
}
