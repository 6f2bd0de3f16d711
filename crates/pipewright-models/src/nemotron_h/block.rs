//! The blocks. Field names are those of a Hugging Face directory, because parameter paths consist of them.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{CausalAttention, Linear, Mamba2, RmsNorm, TensorParallel, relu_squared};
use pipewright::stage::StageContext;

use super::config::{BlockKind, NemotronHConfig};
use super::experts::ExpertMixer;
use crate::error::ConfigError;
use crate::mamba::build_mamba;
use crate::parameter::{Builder, ParameterSource, SplitLinear};
use crate::split::{head_shards, require_parts};

/// `x + mixer(norm(x))`.
#[derive(Module, Debug)]
pub(super) struct Block {
    norm: RmsNorm,
    mixer: Mixer,
}

/// The names of the variants are in Burn's parameter paths and not in those of a Hugging Face directory; see
/// [`crate::parameter`].
#[derive(Module, Debug)]
enum Mixer {
    Mamba(Mamba2),
    Attention(Attention),
    Mlp(FeedForward),
    Experts(ExpertMixer),
}

impl Block {
    pub(super) fn build<S>(
        config: &NemotronHConfig,
        kind: BlockKind,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        let norm = builder.norm(&format!("{path}.norm"), config.hidden_size, config.layer_norm_epsilon)?;
        let path = format!("{path}.mixer");
        let mixer = match kind {
            // Every rank computes the whole mixer.
            BlockKind::Mamba => {
                let biases = (config.use_bias, config.use_conv_bias);
                Mixer::Mamba(build_mamba(config.mamba(), config.hidden_size, biases, &path, builder)?)
            }
            BlockKind::Attention => Mixer::Attention(Attention::build(config, &path, builder)?),
            BlockKind::Mlp => {
                let size = ("intermediate_size", config.intermediate_size);
                require_parts(&path, "up_proj.weight", size, builder.tensor_ranks())?;
                Mixer::Mlp(FeedForward::build(config, &path, builder)?)
            }
            BlockKind::Experts => Mixer::Experts(ExpertMixer::build(config, &path, builder)?),
        };
        Ok(Self { norm, mixer })
    }

    /// Maps hidden states `[batch * sequence, hidden]` to hidden states of the same shape. `documents` has the document of
    /// each token, if rows are divided into documents.
    pub(super) fn forward(
        &self,
        hidden: Tensor<2>,
        attention: &CausalAttention,
        documents: Option<&Arc<[u32]>>,
        (tensor, context): (&TensorParallel, &StageContext),
    ) -> Tensor<2> {
        let x = self.norm.forward(hidden.clone());
        let mixed = match &self.mixer {
            Mixer::Mamba(mixer) => mixer.forward(x, attention.sequence(), documents),
            Mixer::Attention(mixer) => mixer.forward(x, attention, tensor),
            Mixer::Mlp(mixer) => mixer.forward(x, tensor),
            Mixer::Experts(mixer) => mixer.forward(x, tensor, context),
        };
        hidden + mixed
    }
}

#[derive(Module, Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    #[module(skip)]
    head_dim: usize,
}

impl Attention {
    fn build<S>(config: &NemotronHConfig, path: &str, builder: &mut Builder<'_, S>) -> Result<Self, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        let hidden = config.hidden_size;
        let queries = config.num_attention_heads * config.head_dim;
        let keys = config.num_key_value_heads * config.head_dim;
        let (heads, key_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let [heads, key_heads] = head_shards(path, heads, key_heads, builder.tensor_ranks())?;
        let mut inputs = |name: &str, outputs, shards| {
            let split = SplitLinear::Outputs { shards };
            builder.split_linear(false, &format!("{path}.{name}"), [hidden, outputs], split)
        };
        let q_proj = inputs("q_proj", queries, heads)?;
        let k_proj = inputs("k_proj", keys, key_heads)?;
        let v_proj = inputs("v_proj", keys, key_heads)?;
        let output = format!("{path}.o_proj");
        let o_proj = builder.split_linear(false, &output, [queries, hidden], SplitLinear::Inputs)?;
        Ok(Self { q_proj, k_proj, v_proj, o_proj, head_dim: config.head_dim })
    }

    fn forward(&self, x: Tensor<2>, attention: &CausalAttention, tensor: &TensorParallel) -> Tensor<2> {
        let x = tensor.enter(x);
        let q = self.q_proj.forward(x.clone());
        let k = self.k_proj.forward(x.clone());
        let v = self.v_proj.forward(x);
        if self.head_dim.is_multiple_of(2) {
            return self.o_proj.forward_split_inputs(attention.forward(q, k, v), tensor);
        }
        // The attention has heads of even widths. A channel of zeros changes no score, and the attention divides the
        // scores by the root of the larger width.
        let width = self.head_dim as f64;
        let q = q.mul_scalar(((width + 1.0) / width).sqrt());
        let [q, k, v] = [q, k, v].map(|x| self.with_zeros(x));
        self.o_proj.forward_split_inputs(self.without_zeros(attention.forward(q, k, v)), tensor)
    }

    /// Adds a channel of zeros to each head of `[tokens, heads * head_dim]`.
    fn with_zeros(&self, x: Tensor<2>) -> Tensor<2> {
        let [tokens, width] = x.dims();
        let heads = width / self.head_dim;
        let x = x.reshape([tokens * heads, self.head_dim]);
        let zeros = x.clone().narrow(1, 0, 1).zeros_like();
        Tensor::cat(vec![x, zeros], 1).reshape([tokens, heads * (self.head_dim + 1)])
    }

    /// Removes the last channel of each head of `[tokens, heads * (head_dim + 1)]`.
    fn without_zeros(&self, x: Tensor<2>) -> Tensor<2> {
        let [tokens, width] = x.dims();
        let heads = width / (self.head_dim + 1);
        let x = x.reshape([tokens * heads, self.head_dim + 1]);
        x.narrow(1, 0, self.head_dim).reshape([tokens, heads * self.head_dim])
    }
}

/// `down(max(up(x), 0)²)`.
#[derive(Module, Debug)]
pub(super) struct FeedForward {
    up_proj: Linear,
    down_proj: Linear,
}

impl FeedForward {
    pub(super) fn build<S: ParameterSource>(
        config: &NemotronHConfig,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let outputs = SplitLinear::Outputs { shards: builder.tensor_ranks() };
        let (up, down) = (format!("{path}.up_proj"), format!("{path}.down_proj"));
        Ok(Self {
            up_proj: builder.split_linear(bias, &up, [hidden, inner], outputs)?,
            down_proj: builder.split_linear(bias, &down, [inner, hidden], SplitLinear::Inputs)?,
        })
    }

    pub(super) fn forward(&self, x: Tensor<2>, tensor: &TensorParallel) -> Tensor<2> {
        let inner = relu_squared(self.up_proj.forward(tensor.enter(x)));
        self.down_proj.forward_split_inputs(inner, tensor)
    }
}
