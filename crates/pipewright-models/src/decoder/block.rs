//! A decoder block. Field names are those of the checkpoint, because parameter paths consist of them.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{CausalAttention, Linear, RmsNorm, swiglu};

use super::config::DecoderConfig;
use crate::parameter::{Builder, ParameterSource};

#[derive(Module, Debug)]
pub(super) struct DecoderBlock {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
}

impl DecoderBlock {
    pub(super) fn build<S: ParameterSource>(
        config: &DecoderConfig,
        bias: AttentionBias,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let norm = |builder: &mut Builder<'_, S>, name: &str| {
            builder.norm(&format!("{path}.{name}"), config.hidden_size, config.rms_norm_eps)
        };
        Ok(Self {
            input_layernorm: norm(builder, "input_layernorm")?,
            self_attn: Attention::build(config, bias, &format!("{path}.self_attn"), builder)?,
            post_attention_layernorm: norm(builder, "post_attention_layernorm")?,
            mlp: FeedForward::build(config, &format!("{path}.mlp"), builder)?,
        })
    }

    /// Maps hidden states `[batch * sequence, hidden]` to hidden states of the same shape.
    pub(super) fn forward(&self, hidden: Tensor<2>, attention: &CausalAttention) -> Tensor<2> {
        let attended = self.self_attn.forward(self.input_layernorm.forward(hidden.clone()), attention);
        let hidden = hidden + attended;
        let transformed = self.mlp.forward(self.post_attention_layernorm.forward(hidden.clone()));
        hidden + transformed
    }
}

/// The linear layers of the attention that have a bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionBias {
    /// The layers that make queries, keys and values.
    pub inputs: bool,
    /// The layer that mixes the heads.
    pub output: bool,
}

#[derive(Module, Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
}

impl Attention {
    fn build<S: ParameterSource>(
        config: &DecoderConfig,
        bias: AttentionBias,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim());
        let queries = config.num_attention_heads * head_dim;
        let keys = config.num_key_value_heads * head_dim;
        let mut linear = |name: &str, inputs, outputs, bias| {
            let path = format!("{path}.{name}");
            if bias {
                builder.linear_with_bias(&path, inputs, outputs)
            } else {
                builder.linear(&path, inputs, outputs)
            }
        };
        Ok(Self {
            q_proj: linear("q_proj", hidden, queries, bias.inputs)?,
            k_proj: linear("k_proj", hidden, keys, bias.inputs)?,
            v_proj: linear("v_proj", hidden, keys, bias.inputs)?,
            o_proj: linear("o_proj", queries, hidden, bias.output)?,
        })
    }

    fn forward(&self, x: Tensor<2>, attention: &CausalAttention) -> Tensor<2> {
        let q = self.q_proj.forward(x.clone());
        let k = self.k_proj.forward(x.clone());
        let v = self.v_proj.forward(x);
        self.o_proj.forward(attention.forward(q, k, v))
    }
}

#[derive(Module, Debug)]
struct FeedForward {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl FeedForward {
    fn build<S: ParameterSource>(
        config: &DecoderConfig,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            gate_proj: builder.linear(&format!("{path}.gate_proj"), hidden, inner)?,
            up_proj: builder.linear(&format!("{path}.up_proj"), hidden, inner)?,
            down_proj: builder.linear(&format!("{path}.down_proj"), inner, hidden)?,
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let gate = self.gate_proj.forward(x.clone());
        let up = self.up_proj.forward(x);
        self.down_proj.forward(swiglu(gate, up))
    }
}
