//! Mamba-2 mixers: their parameters and costs, which are the same in every family.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{DepthwiseConvolution, GroupNormWeight, MambaCache, MambaScan, MambaSizes};
use pipewright::stage::StageContext;
use pipewright_shapes::model;

use crate::cost::{Cost, GATE_PASSES, NORM_PASSES};
use crate::error::ModelError;
use crate::init::Uniform;
use crate::parameter::{Builder, ParameterKind, ParameterSpec, SplitLinear};
use crate::projection::{Projection, SharedInput};

/// Why a model with mixers cannot run slices of microbatches.
pub(crate) const NO_SLICES: &str = "its Mamba layers do not pass their state from slice to slice";

/// The parts of a mixer that have a bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MambaBiases {
    pub(crate) projections: bool,
    pub(crate) convolution: bool,
}

/// The form of the mixers of a family of decoders.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MambaForm {
    pub(crate) sizes: MambaSizes,
    pub(crate) biases: MambaBiases,
}

/// A mixer. Each rank of a tensor group has the whole one.
#[derive(Module, Debug)]
pub(crate) struct MambaMixer {
    in_proj: Projection,
    scan: MambaScan,
    out_proj: Projection,
}

impl MambaMixer {
    /// Builds the mixer at `path` for hidden states of width `hidden`.
    pub(crate) fn build(
        MambaForm { sizes, biases }: MambaForm,
        hidden: usize,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let (heads, width, convolved) = (sizes.heads, sizes.width(), sizes.convolved());
        let scale = ParameterKind::Scale;
        let linear = |builder: &mut Builder<'_>, name: &str, shape| {
            builder.projection(biases.projections, &format!("{path}.{name}"), shape, SplitLinear::Whole)
        };
        let in_proj = linear(builder, "in_proj", [hidden, sizes.projected()])?;
        let conv = format!("{path}.conv1d");
        let scan = MambaScan {
            conv1d: DepthwiseConvolution {
                weight: builder.parameter(&conv, "weight", [convolved, 1, sizes.taps], scale)?,
                bias: biases
                    .convolution
                    .then(|| builder.parameter(&conv, "bias", [convolved], scale))
                    .transpose()?,
            },
            dt_bias: builder.parameter(path, "dt_bias", [heads], scale)?,
            A_log: builder.parameter(path, "A_log", [heads], scale)?,
            D: builder.parameter(path, "D", [heads], scale)?,
            norm: GroupNormWeight {
                weight: builder.parameter(&format!("{path}.norm"), "weight", [width], scale)?,
            },
            sizes,
        };
        Ok(Self { in_proj, scan, out_proj: linear(builder, "out_proj", [width, hidden])? })
    }

    /// Mixes sequences of `sequence` rows each, or with a cache the next rows of its sequence. Shapes: `[rows, hidden]`
    /// in and out. Nothing of a document of `documents` reaches another one.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        (sequence, documents): (usize, Option<&Arc<[u32]>>),
        cache: Option<&mut MambaCache>,
        context: &StageContext,
    ) -> Tensor<2> {
        let projected = self.in_proj.forward(&SharedInput::new(x), context);
        let mixed = match cache {
            Some(cache) => self.scan.extend(projected, cache),
            None => self.scan.forward(projected, sequence, documents),
        };
        self.out_proj.forward(&SharedInput::new(mixed), context)
    }
}

/// Returns whether a parameter has a number for each head of a mixer's scan. The scan multiplies decays of
/// many tokens, so it is sensitive to the rounding of these few numbers.
pub(crate) fn is_of_scan(path: &str) -> bool {
    [".dt_bias", ".A_log", ".D"].iter().any(|name| path.ends_with(name))
}

/// Returns whether a parameter is the matrix of a mixer's projection. transformers trains with kernels that read it as it is.
pub(crate) fn is_projection_of_mamba(path: &str) -> bool {
    let is_projection = [".in_proj.weight", ".out_proj.weight"].iter().any(|name| path.ends_with(name));
    is_projection && !path.contains(".linear_attn.")
}

/// The settings of the initial parameters of mixers. They are drawn as in the Mamba reference: the heads of a
/// fresh model forget at very different rates.
pub(crate) struct MambaInit {
    pub(crate) seed: u64,
    /// The range of the initial steps, whose logarithms are uniform, and the lowest step.
    pub(crate) steps: (f64, f64),
    pub(crate) floor: f64,
    pub(crate) taps: usize,
}

impl MambaInit {
    /// Returns the initial values of a mixer's own parameters; `None` for any other parameter, and for a
    /// parameter of ones.
    pub(crate) fn parameter(&self, spec: &ParameterSpec) -> Option<Vec<f32>> {
        let names: Vec<&str> = spec.path.rsplit('.').take(2).collect();
        match names.as_slice() {
            ["A_log", ..] => Some((1..=spec.shape[0]).map(|head| libm::log(head as f64) as f32).collect()),
            ["dt_bias", ..] => Some(self.step_biases(spec)),
            [_, "conv1d"] => Some(uniform(self.seed, spec, 1.0 / (self.taps as f64).sqrt())),
            _ => None,
        }
    }

    /// Returns the inverse of the softplus of steps whose logarithms are uniform.
    fn step_biases(&self, spec: &ParameterSpec) -> Vec<f32> {
        let (low, high) = self.steps;
        let mut uniform = Uniform::new(self.seed, &spec.path);
        let bias = |_| {
            let step = libm::exp(libm::log(low) + uniform.next() * libm::log(high / low)).max(self.floor);
            (step + libm::log(-libm::expm1(-step))) as f32
        };
        (0..spec.shape[0]).map(bias).collect()
    }
}

/// Returns the initial values of a mixer's own parameters in a family of decoders, where biases of steps are 1, as in
/// transformers; `None` for a parameter of ones, and for one that is drawn as in every family.
pub(crate) fn initial(seed: u64, form: &MambaForm, spec: &ParameterSpec) -> Option<Vec<f32>> {
    let init = MambaInit { seed, steps: (1.0, 1.0), floor: 1.0, taps: form.sizes.taps };
    if spec.path.ends_with(".dt_bias") { None } else { init.parameter(spec) }
}

/// Returns numbers that are uniform between `-bound` and `bound`.
pub(crate) fn uniform(seed: u64, spec: &ParameterSpec, bound: f64) -> Vec<f32> {
    let mut uniform = Uniform::new(seed, &spec.path);
    let len = spec.shape.iter().product();
    (0..len).map(|_| ((2.0 * uniform.next() - 1.0) * bound) as f32).collect()
}

/// Tokens in a chunk of the scan.
const CHUNK: u64 = 64;

/// Returns the cost of a mixer whose projections have no biases. In the forward each token meets the tokens of its
/// chunk and the state twice; the backward has twice the products of the tokens, and six of the state.
pub(crate) fn cost(sizes: &MambaSizes) -> Cost {
    let (width, state) = (sizes.width() as u64, sizes.state as u64);
    let pairs = 3 * CHUNK * width + 4 * CHUNK * sizes.groups as u64 * state;
    let states = 8 * state * width;
    // A decay of each head and pair, forward and backward. They stay in the cache, where a pass takes half as
    // long.
    let decays = CHUNK * sizes.heads as u64;
    let convolved = sizes.convolved() as u64;
    let mixer = model::Mamba2 {
        heads: sizes.heads as u64,
        head_size: sizes.head_dim as u64,
        state,
        groups: sizes.groups as u64,
        convolution: sizes.taps as u64,
        chunk: CHUNK,
    };
    let passes = convolved * (4 + sizes.taps as u64) + width * (GATE_PASSES + NORM_PASSES);
    Cost {
        mixing: 2 * (pairs + states),
        elements: decays + passes,
        // Other devices compute the scan again.
        kept_on_devices: -((sizes.width() + sizes.groups) as i64),
        ..Cost::keeping(mixer.kept())
    }
}
