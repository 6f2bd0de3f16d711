//! The mixer: its parameters and sizes.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright_kernel::convolution;
use pipewright_kernel::scan;

use super::super::linear::Linear;

/// A Mamba-2 mixer, with its parameters named and shaped as checkpoints name and shape them.
#[derive(Module, Debug)]
pub struct Mamba2 {
    /// To gate, convolved channels (`x`, `b`, `c`) and steps, in this order.
    pub in_proj: Linear,
    /// The convolution of `x`, `b` and `c`.
    pub conv1d: DepthwiseConvolution,
    /// Added to the steps before the softplus, `[heads]`.
    pub dt_bias: Param<Tensor<1>>,
    /// The logarithm of each head's rate of decay, `[heads]`.
    pub A_log: Param<Tensor<1>>,
    /// The factor of `x` that is added to each head's result, `[heads]`.
    pub D: Param<Tensor<1>>,
    /// The norm after the gate.
    pub norm: GroupNormWeight,
    /// From the heads' channels to the hidden states.
    pub out_proj: Linear,
    /// Sizes and constants.
    #[module(skip)]
    pub sizes: MambaSizes,
}

/// The part of a mixer between its projections: the convolution, the scan and the norm, with the parameters of [`Mamba2`].
/// A layer with other projections has it.
#[derive(Module, Debug)]
pub struct MambaScan {
    /// As in [`Mamba2`].
    pub conv1d: DepthwiseConvolution,
    /// As in [`Mamba2`].
    pub dt_bias: Param<Tensor<1>>,
    /// As in [`Mamba2`].
    pub A_log: Param<Tensor<1>>,
    /// As in [`Mamba2`].
    pub D: Param<Tensor<1>>,
    /// As in [`Mamba2`].
    pub norm: GroupNormWeight,
    /// Sizes and constants.
    #[module(skip)]
    pub sizes: MambaSizes,
}

impl Mamba2 {
    /// Returns the part between the projections, which shares the parameters.
    pub(super) fn scan(&self) -> MambaScan {
        let Self { conv1d, dt_bias, A_log, D, norm, sizes, .. } = self.clone();
        MambaScan { conv1d, dt_bias, A_log, D, norm, sizes }
    }
}

/// The parameters of a depthwise convolution.
#[derive(Module, Debug)]
pub struct DepthwiseConvolution {
    /// `[channels, 1, taps]`; the last tap belongs to the current token.
    pub weight: Param<Tensor<3>>,
    /// `[channels]`.
    pub bias: Option<Param<Tensor<1>>>,
}

/// The factors of a norm in groups.
#[derive(Module, Debug)]
pub struct GroupNormWeight {
    /// `[heads * head_dim]`.
    pub weight: Param<Tensor<1>>,
}

/// Sizes and constants of a Mamba-2 mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MambaSizes {
    /// Heads of the scan.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups of neighbouring heads; a group shares `b` and `c`, and is a run of the norm.
    pub groups: usize,
    /// Length of `b` and `c`.
    pub state: usize,
    /// Tokens that the convolution sees.
    pub taps: usize,
    /// The lowest and the highest step.
    pub limits: (f64, f64),
    /// Added to the mean square in the norm.
    pub epsilon: f64,
}

impl MambaSizes {
    /// Returns the channels of all heads.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the channels of the convolution.
    pub fn convolved(&self) -> usize {
        self.width() + 2 * self.groups * self.state
    }

    /// Returns the width of the input projection's result.
    pub fn projected(&self) -> usize {
        self.width() + self.convolved() + self.heads
    }

    pub(super) fn scan(&self, rows: usize, sequence: usize) -> scan::Dims {
        let &Self { heads, head_dim, groups, state, .. } = self;
        scan::Dims { batch: rows / sequence, sequence, heads, head_dim, groups, state }
    }

    pub(super) fn convolution(&self, sequence: usize) -> convolution::Dims {
        let (stride, start) = (self.projected(), self.width());
        convolution::Dims { sequence, channels: self.convolved(), taps: self.taps, stride, start }
    }

    pub(super) fn steps(&self) -> scan::Steps {
        let start = self.width() + self.convolved();
        let limits = (self.limits.0 as f32, self.limits.1 as f32);
        scan::Steps { heads: self.heads, stride: self.projected(), start, limits }
    }
}
