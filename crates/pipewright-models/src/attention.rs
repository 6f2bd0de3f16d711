//! The attention of a block: the four linear layers, and the norms of the heads in families that have them.
//! The families differ in the function that mixes the tokens between these layers.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright::nn::{Region, TensorParallel, sigmoid};
use pipewright::stage::StageContext;
use pipewright::tensor::Placement;

use crate::error::ModelError;
use crate::file_layout::OutputParts;
use crate::norm::{Norm, NormForm};
use crate::parameter::{Builder, ParameterKind, SplitLinear};
use crate::projection::{Projection, SharedInput, part_of};
use crate::split::head_shards;

/// The sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionSizes {
    /// The width of the hidden states.
    pub(crate) hidden: usize,
    /// The number of query heads.
    pub(crate) heads: usize,
    /// The number of key and value heads.
    pub(crate) key_heads: usize,
    /// The width of a head.
    pub(crate) head_dim: usize,
}

impl AttentionSizes {
    /// Returns the shape on which costs depend. They have the window apart.
    pub(crate) fn shape(self) -> pipewright_shapes::model::Attention {
        pipewright_shapes::model::Attention {
            heads: self.heads as u64,
            key_value_heads: self.key_heads as u64,
            head_size: self.head_dim as u64,
            window: None,
            rotary_size: self.head_dim as u64,
            gate: 0,
        }
    }
}

/// The linear layers of an attention that have a bias.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AttentionBias {
    /// The layers that make queries, keys and values.
    pub(crate) inputs: bool,
    /// The layer that mixes the heads.
    pub(crate) output: bool,
}

impl AttentionBias {
    /// Returns the biases of `attention_bias`, which is for all four layers.
    pub(crate) fn all(attention_bias: bool) -> Self {
        Self { inputs: attention_bias, output: attention_bias }
    }
}

/// The normalisations of queries and keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InputNorms {
    pub(crate) form: NormForm,
    /// Whether all heads are normalised together, instead of each by itself.
    pub(crate) joins_heads: bool,
}

/// The parameters of an attention.
#[derive(Module, Debug)]
pub(crate) struct Attention {
    /// The projections that make queries, keys and values, or the one that makes all of them.
    inputs: Vec<Projection>,
    /// The parts of the outputs of one that makes all.
    #[module(skip)]
    joined: Option<OutputParts>,
    o_proj: Projection,
    /// The width of a head, if the projection of the queries also makes a gate of each head's output, behind the head's
    /// query.
    #[module(skip)]
    gated_head: Option<usize>,
    /// The sink of each head, in a family that has them, `[heads]`.
    sinks: Option<Param<Tensor<1>>>,
    /// The normalisations of a head's queries and keys, in a family that has them.
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
}

impl Attention {
    /// Builds the attention at `path`. With `norms`, queries and keys are normalised.
    pub(crate) fn build(
        sizes: AttentionSizes,
        bias: AttentionBias,
        norms: Option<InputNorms>,
        has_gate: bool,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let AttentionSizes { hidden, heads, key_heads, head_dim } = sizes;
        let (queries, keys) = (heads * head_dim, key_heads * head_dim);
        let shards = head_shards(path, heads, key_heads, builder.tensor_ranks())?;
        let mut linear = |bias, name: &str, sizes, split| {
            builder.projection(bias, &format!("{path}.{name}"), sizes, split)
        };
        let [heads, key_heads] = shards.map(|shards| SplitLinear::Outputs { shards });
        let inputs = vec![
            linear(bias.inputs, "q_proj", [hidden, queries * (1 + usize::from(has_gate))], heads)?,
            linear(bias.inputs, "k_proj", [hidden, keys], key_heads)?,
            linear(bias.inputs, "v_proj", [hidden, keys], key_heads)?,
        ];
        let o_proj = linear(bias.output, "o_proj", [queries, hidden], SplitLinear::Inputs)?;
        let mut norm = |name: &str, width: usize, shards: u32| {
            let path = format!("{path}.{name}");
            let build = |InputNorms { form, joins_heads }| {
                if joins_heads {
                    builder.split_norm(&path, width, form, shards)
                } else {
                    // Each rank normalises its own heads.
                    builder.head_norm(&path, head_dim, form)
                }
            };
            norms.map(build).transpose()
        };
        let gated_head = has_gate.then_some(head_dim);
        let (q_norm, k_norm) = (norm("q_norm", queries, shards[0])?, norm("k_norm", keys, shards[1])?);
        Ok(Self { inputs, joined: None, o_proj, gated_head, sinks: None, q_norm, k_norm })
    }

    /// Adds a sink for each head to the attention at `path`.
    pub(crate) fn with_sinks(
        self,
        sizes: AttentionSizes,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let split = Placement::split(0, builder.tensor_ranks());
        let sinks = builder.placed(path, "sinks", [sizes.heads], ParameterKind::Bias, split)?;
        Ok(Self { sinks: Some(sinks), ..self })
    }

    /// Returns the sinks of this rank's heads.
    pub(crate) fn sinks(&self) -> Option<Tensor<1>> {
        self.sinks.as_ref().map(Param::val)
    }

    /// Builds an attention at `path` in which one matrix makes queries, keys and values.
    pub(crate) fn build_joined(
        sizes: AttentionSizes,
        bias: AttentionBias,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let AttentionSizes { hidden, heads, key_heads, head_dim } = sizes;
        let widths = [heads / key_heads * head_dim, head_dim, head_dim];
        let parts = OutputParts { groups: key_heads, widths };
        let of_heads = (("num_key_value_heads", key_heads), parts);
        let qkv_proj =
            builder.joined_projection(bias.inputs, &format!("{path}.qkv_proj"), hidden, of_heads)?;
        let (o_proj, sizes) = (format!("{path}.o_proj"), [heads * head_dim, hidden]);
        let o_proj = builder.projection(bias.output, &o_proj, sizes, SplitLinear::Inputs)?;
        let (inputs, joined) = (vec![qkv_proj], Some(parts));
        Ok(Self { inputs, joined, o_proj, gated_head: None, sinks: None, q_norm: None, k_norm: None })
    }

    /// Returns queries, keys and values, and the gates of the outputs.
    fn inputs(
        &self,
        x: &SharedInput,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> ([Tensor<2>; 3], Option<Tensor<2>>) {
        match (self.inputs.as_slice(), self.joined) {
            ([all], Some(parts)) => {
                let all = all.forward(x, context);
                ([0, 1, 2].map(|part| part_of(all.clone(), parts, part)), None)
            }
            ([q, k, v], _) => {
                let (q, gate) = self.queries(q.forward(x, context));
                let q = normalised(q, self.q_norm.as_ref(), tensor);
                let k = normalised(k.forward(x, context), self.k_norm.as_ref(), tensor);
                ([q, k, v.forward(x, context)], gate)
            }
            _ => unreachable!("an attention has one joined projection or three"),
        }
    }

    /// Takes queries and gates apart.
    fn queries(&self, outputs: Tensor<2>) -> (Tensor<2>, Option<Tensor<2>>) {
        let Some(head) = self.gated_head else { return (outputs, None) };
        let parts = OutputParts { groups: outputs.dims()[1] / (2 * head), widths: [head, head, 0] };
        (part_of(outputs.clone(), parts, 0), Some(part_of(outputs, parts, 1)))
    }

    /// Maps the hidden states of the tokens outside of the region, `[tokens, hidden]`, to the same shape. `attend`
    /// takes queries, keys and values of this rank's heads for the tokens inside, `[tokens, heads * head_dim]` each,
    /// and returns the values that the queries attend to.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        region: &Region<'_>,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        context: &StageContext,
    ) -> Tensor<2> {
        let x = SharedInput::of_several(region.enter(x));
        let (inputs, gate) = self.inputs(&x, region.tensor(), context);
        drop(x);
        let attended = attend(inputs);
        let attended = match gate {
            Some(gate) => attended * sigmoid(gate),
            None => attended,
        };
        self.o_proj.forward_region(&SharedInput::new(attended), region, context)
    }
}

/// Normalises `[tokens, heads * head_dim]`: each head by itself if the norm has a factor for each element of
/// a head, and all of them together, also the heads of other ranks, if it has one for each element.
fn normalised(x: Tensor<2>, norm: Option<&Norm>, tensor: &TensorParallel) -> Tensor<2> {
    let Some(norm) = norm else { return x };
    let ([tokens, width], part) = (x.dims(), norm.width());
    norm.forward_split(x.reshape([tokens * width / part, part]), tensor).reshape([tokens, width])
}
