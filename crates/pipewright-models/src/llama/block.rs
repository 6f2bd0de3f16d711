//! One decoder block. Field names are the checkpoint's, since parameter paths follow from them.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};

use super::LlamaConfig;
use crate::layer::{CausalMask, RmsNorm, Rotary, causal_attention, swiglu};
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
    pub(super) fn forward(&self, hidden: Tensor<2>, positions: &Positions) -> Tensor<2> {
        let attended = self.self_attn.forward(self.input_layernorm.forward(hidden.clone()), positions);
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
    #[module(skip)]
    head_dim: usize,
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
            head_dim,
        })
    }

    fn forward(&self, x: Tensor<2>, positions: &Positions) -> Tensor<2> {
        let [rows, _] = x.dims();
        let sequence = positions.sequence;
        let heads = |x: Tensor<2>| {
            let heads = x.dims()[1] / self.head_dim;
            x.reshape([rows / sequence, sequence, heads, self.head_dim])
        };
        let q = positions.queries.apply(heads(self.q_proj.forward(x.clone())));
        let k = positions.keys.apply(heads(self.k_proj.forward(x.clone())));
        let v = heads(self.v_proj.forward(x));
        self.o_proj.forward(causal_attention(q, k, v, &positions.mask))
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

/// What every block of a stage shares for one sequence length: all constants, made once.
#[derive(Debug, Clone)]
pub(super) struct Positions {
    pub(super) sequence: usize,
    pub(super) device: Device,
    queries: Rotary,
    keys: Rotary,
    mask: CausalMask,
}

impl Positions {
    /// The `1 / sqrt(head_dim)` of the attention is in the queries' tables, where it costs nothing.
    pub(super) fn new(sequence: usize, head_dim: usize, theta: f64, device: Device) -> Self {
        let scale = 1.0 / (head_dim as f64).sqrt();
        Self {
            sequence,
            queries: Rotary::new(sequence, head_dim, theta, scale, &device),
            keys: Rotary::new(sequence, head_dim, theta, 1.0, &device),
            mask: CausalMask::new(sequence, &device),
            device,
        }
    }
}
