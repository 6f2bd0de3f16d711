//! A decoder block. Field names are those of a Hugging Face directory, because parameter paths consist of them.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{Linear, RmsNorm, TensorParallel};
use pipewright::stage::StageContext;

use super::config::DecoderConfig;
use super::feed_forward::FeedForward;
use super::form::BlockForm;
use crate::error::ConfigError;
use crate::parameter::{Builder, ParameterSource, SplitLinear};
use crate::split::head_shards;

#[derive(Module, Debug)]
pub(super) struct DecoderBlock {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
}

impl DecoderBlock {
    pub(super) fn build<S>(
        config: &DecoderConfig,
        form: &BlockForm<'_>,
        index: usize,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        let norm = |builder: &mut Builder<'_, S>, name: &str| {
            builder.norm(&format!("{path}.{name}"), config.hidden_size, config.rms_norm_eps)
        };
        Ok(Self {
            input_layernorm: norm(builder, "input_layernorm")?,
            self_attn: Attention::build(config, form, &format!("{path}.self_attn"), builder)?,
            post_attention_layernorm: norm(builder, "post_attention_layernorm")?,
            mlp: FeedForward::build(config, form, index, &format!("{path}.mlp"), builder)?,
        })
    }

    /// Returns the path of the block's mixture if its balance loss is part of the training loss.
    pub(super) fn balanced(&self) -> Option<&str> {
        self.mlp.balanced()
    }

    /// Maps hidden states `[batch * sequence, hidden]` to hidden states of the same shape. `attend` takes queries, keys and
    /// values of this rank's heads and returns what the queries attend to.
    pub(super) fn forward(
        &self,
        hidden: Tensor<2>,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let attended = self.self_attn.forward(self.input_layernorm.forward(hidden.clone()), attend, tensor);
        let hidden = hidden + attended;
        let normalised = self.post_attention_layernorm.forward(hidden.clone());
        let transformed = self.mlp.forward(normalised, tensor, context);
        hidden + transformed
    }
}

#[derive(Module, Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    /// The normalisations of a head's queries and keys, in a family that has them.
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
}

impl Attention {
    fn build<S>(
        config: &DecoderConfig,
        form: &BlockForm<'_>,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim());
        let queries = config.num_attention_heads * head_dim;
        let keys = config.num_key_value_heads * head_dim;
        let bias = form.bias;
        let (heads, key_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let [heads, key_heads] = head_shards(path, heads, key_heads, builder.tensor_ranks())?;
        let mut inputs = |name: &str, outputs, shards| {
            let split = SplitLinear::Outputs { shards };
            builder.split_linear(bias.inputs, &format!("{path}.{name}"), [hidden, outputs], split)
        };
        let q_proj = inputs("q_proj", queries, heads)?;
        let k_proj = inputs("k_proj", keys, key_heads)?;
        let v_proj = inputs("v_proj", keys, key_heads)?;
        let output = format!("{path}.o_proj");
        let o_proj = builder.split_linear(bias.output, &output, [queries, hidden], SplitLinear::Inputs)?;
        // Each rank normalises its own heads.
        let mut norm = |name: &str| {
            let norm = form
                .normalises_heads
                .then(|| builder.partial_norm(&format!("{path}.{name}"), head_dim, config.rms_norm_eps));
            norm.transpose()
        };
        let (q_norm, k_norm) = (norm("q_norm")?, norm("k_norm")?);
        Ok(Self { q_proj, k_proj, v_proj, o_proj, q_norm, k_norm })
    }

    fn forward(
        &self,
        x: Tensor<2>,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        tensor: &TensorParallel,
    ) -> Tensor<2> {
        let x = tensor.enter(x);
        let q = normalised(self.q_proj.forward(x.clone()), self.q_norm.as_ref());
        let k = normalised(self.k_proj.forward(x.clone()), self.k_norm.as_ref());
        let v = self.v_proj.forward(x);
        self.o_proj.forward_split_inputs(attend([q, k, v]), tensor)
    }
}

/// Normalises each head of `[rows, heads * head_dim]`; the weight has one factor for each element of a head.
fn normalised(x: Tensor<2>, norm: Option<&RmsNorm>) -> Tensor<2> {
    let Some(norm) = norm else { return x };
    let ([rows, width], [head_dim]) = (x.dims(), norm.weight.dims());
    norm.forward(x.reshape([rows * width / head_dim, head_dim])).reshape([rows, width])
}
