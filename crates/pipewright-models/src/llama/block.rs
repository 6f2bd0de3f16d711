//! One decoder block. Field names are the checkpoint's, since parameter paths follow from them.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{CausalAttention, Linear, RmsNorm, swiglu};

use super::LlamaConfig;
use crate::parameter::{Builder, ParameterSource};

#[derive(Module, Debug)]
pub(super) struct LlamaBlock {
    input_layernorm: RmsNorm,
    self_attn: LlamaAttention,
    post_attention_layernorm: RmsNorm,
    mlp: LlamaMlp,
}

impl LlamaBlock {
    pub(super) fn build<S: ParameterSource>(
        config: &LlamaConfig,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let norm = |builder: &mut Builder<'_, S>, name: &str| {
            builder.norm(&format!("{path}.{name}"), config.hidden_size, config.rms_norm_eps)
        };
        Ok(Self {
            input_layernorm: norm(builder, "input_layernorm")?,
            self_attn: LlamaAttention::build(config, &format!("{path}.self_attn"), builder)?,
            post_attention_layernorm: norm(builder, "post_attention_layernorm")?,
            mlp: LlamaMlp::build(config, &format!("{path}.mlp"), builder)?,
        })
    }

    /// Hidden states `[batch * sequence, hidden]` in and out.
    pub(super) fn forward(&self, hidden: Tensor<2>, attention: &CausalAttention) -> Tensor<2> {
        let attended = self.self_attn.forward(self.input_layernorm.forward(hidden.clone()), attention);
        let hidden = hidden + attended;
        let transformed = self.mlp.forward(self.post_attention_layernorm.forward(hidden.clone()));
        hidden + transformed
    }
}

#[derive(Module, Debug)]
struct LlamaAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
}

impl LlamaAttention {
    fn build<S: ParameterSource>(
        config: &LlamaConfig,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let head_dim = config.head_dim();
        let hidden = config.hidden_size;
        let queries = config.num_attention_heads * head_dim;
        let keys = config.num_key_value_heads * head_dim;
        Ok(Self {
            q_proj: builder.linear(&format!("{path}.q_proj"), hidden, queries)?,
            k_proj: builder.linear(&format!("{path}.k_proj"), hidden, keys)?,
            v_proj: builder.linear(&format!("{path}.v_proj"), hidden, keys)?,
            o_proj: builder.linear(&format!("{path}.o_proj"), queries, hidden)?,
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
struct LlamaMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl LlamaMlp {
    fn build<S: ParameterSource>(
        config: &LlamaConfig,
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
