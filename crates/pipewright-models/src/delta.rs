//! Gated DeltaNet mixers: their projections, parameters and costs.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{DeltaCache, DeltaRule, DeltaSizes, DepthwiseConvolution, swiglu};
use pipewright::stage::StageContext;

use crate::cost::{Cost, GATE_PASSES, NORM_PASSES};
use crate::error::ModelError;
use crate::file_layout::OutputParts;
use crate::init::Uniform;
use crate::mamba::uniform;
use crate::norm::{Norm, NormForm};
use crate::parameter::{Builder, ParameterKind, ParameterSpec, SplitLinear};
use crate::projection::{Projection, SharedInput, part_of};

/// The form of a mixer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaForm {
    pub sizes: DeltaSizes,
    /// Whether one matrix makes queries, keys, values and gates, and another one strengths and decays, each with the
    /// parts of a head of keys next to each other.
    pub joins_projections: bool,
}

/// A mixer. Each rank of a tensor group has the whole one.
#[derive(Module, Debug)]
pub(crate) struct GatedDelta {
    /// Two projections, or one for the queries, keys and values, one for the gates, one for the strengths, and one for
    /// the decays.
    inputs: Vec<Projection>,
    rule: DeltaRule,
    /// The normalisation of each head's values, before they are multiplied by their gates.
    norm: Norm,
    out_proj: Projection,
}

impl GatedDelta {
    /// Builds the mixer at `path` for hidden states of width `hidden`.
    pub(crate) fn build(
        DeltaForm { sizes, joins_projections }: DeltaForm,
        (hidden, epsilon): (usize, f64),
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let (channels, width, heads) = (sizes.channels(), sizes.value_width(), sizes.value_heads);
        let mut linear = |(name, outputs): (&str, usize), inputs| {
            builder.projection(false, &format!("{path}.{name}"), [inputs, outputs], SplitLinear::Whole)
        };
        let inputs: &[(&str, usize)] = if joins_projections {
            &[("in_proj_qkvz", channels + width), ("in_proj_ba", 2 * heads)]
        } else {
            &[("in_proj_qkv", channels), ("in_proj_z", width), ("in_proj_b", heads), ("in_proj_a", heads)]
        };
        let inputs = inputs.iter().map(|&input| linear(input, hidden)).collect::<Result<_, ModelError>>()?;
        let out_proj = linear(("out_proj", hidden), width)?;
        let (conv, scale) = (format!("{path}.conv1d"), ParameterKind::Scale);
        let weight = builder.parameter(&conv, "weight", [channels, 1, sizes.taps], scale)?;
        let rule = DeltaRule {
            conv1d: DepthwiseConvolution { weight, bias: None },
            dt_bias: builder.parameter(path, "dt_bias", [heads], scale)?,
            A_log: builder.parameter(path, "A_log", [heads], scale)?,
            sizes,
        };
        let norm = builder.form_norm(&format!("{path}.norm"), sizes.value_dim, NormForm::usual(epsilon))?;
        Ok(Self { inputs, rule, norm, out_proj })
    }

    /// Mixes sequences of `sequence` rows each, or with a cache the next rows of its sequence. Shapes: `[rows, hidden]`
    /// in and out. Nothing of a document of `documents` reaches another one.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        (sequence, documents): (usize, Option<&Arc<[u32]>>),
        cache: Option<&mut DeltaCache>,
        context: &StageContext,
    ) -> Tensor<2> {
        let x = SharedInput::of_several(x);
        let (mixed, gate, of_state) = self.projected(&x, context);
        drop(x);
        let y = match cache {
            Some(cache) => self.rule.extend(mixed, of_state, cache),
            None => self.rule.forward(mixed, of_state, sequence, documents),
        };
        let DeltaSizes { value_heads, value_dim, .. } = self.rule.sizes;
        let rows = y.dims()[0];
        let y = self.norm.forward(y.reshape([rows * value_heads, value_dim]));
        let y = swiglu(gate, y.reshape([rows, value_heads * value_dim]));
        self.out_proj.forward(&SharedInput::new(y), context)
    }

    /// Returns all queries, keys and values, the gates, and the strengths and decays.
    fn projected(&self, x: &SharedInput, context: &StageContext) -> (Tensor<2>, Tensor<2>, [Tensor<2>; 2]) {
        let outputs: Vec<_> = self.inputs.iter().map(|input| input.forward(x, context)).collect();
        let [joined, gates] = match <[_; 4]>::try_from(outputs) {
            Ok([mixed, gate, strengths, decays]) => return (mixed, gate, [strengths, decays]),
            Err(outputs) => <[_; 2]>::try_from(outputs).expect("a mixer has two or four projections"),
        };
        let DeltaSizes { key_heads: groups, value_heads, key_dim, value_dim, .. } = self.rule.sizes;
        let shared = value_heads / groups;
        let values = shared * value_dim;
        let parts = OutputParts { groups, widths: [2 * key_dim, values, values] };
        let [both, v, gate] = [0, 1, 2].map(|part| part_of(joined.clone(), parts, part));
        let halves = |x: Tensor<2>, width| {
            let parts = OutputParts { groups, widths: [width, width, 0] };
            [0, 1].map(|part| part_of(x.clone(), parts, part))
        };
        let [q, k] = halves(both, key_dim);
        (Tensor::cat(vec![q, k, v], 1), gate, halves(gates, shared))
    }
}

/// Returns the initial values of a mixer's own parameters, as in transformers and in the reference of its convolution;
/// `None` for a parameter that is drawn as in every family.
pub(crate) fn initial(seed: u64, spec: &ParameterSpec) -> Option<Vec<f32>> {
    let names: Vec<&str> = spec.path.rsplit('.').take(2).collect();
    match names.as_slice() {
        ["A_log", ..] => {
            let mut uniform = Uniform::new(seed, &spec.path);
            Some((0..spec.shape[0]).map(|_| libm::log(0.01 + 15.99 * uniform.next()) as f32).collect())
        }
        [_, "conv1d"] => Some(uniform(seed, spec, 1.0 / (spec.shape[2] as f64).sqrt())),
        _ => None,
    }
}

/// Element-wise passes of the parts of the projections, which are taken apart and put together.
const PART_PASSES: u64 = 8;

/// Operations of a forward for each number of a state.
const STATE_OPERATIONS: u64 = 7;
/// How much longer a backward takes, which computes the states twice again.
const BACKWARD: u64 = 7;

/// Returns the cost of a mixer.
pub(crate) fn cost(sizes: &DeltaSizes) -> Cost {
    let (channels, width) = (sizes.channels() as u64, sizes.value_width() as u64);
    let heads = sizes.value_heads as u64;
    let passes = channels * (PART_PASSES + 4 + sizes.taps as u64) + width * (GATE_PASSES + NORM_PASSES);
    Cost {
        mixing: (1 + BACKWARD) * STATE_OPERATIONS * sizes.key_dim as u64 * width,
        elements: passes,
        // The rows of the rule, its result before and behind the norm, the gate, and their product. The steps behind the
        // strengths and decays keep a few numbers of each head.
        kept: channels + 4 * width + 8 * heads,
        feed_forward: width,
        ..Cost::default()
    }
}
