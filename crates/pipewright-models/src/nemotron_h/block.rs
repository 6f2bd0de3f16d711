//! The blocks. Fields have the names in a Hugging Face directory, because parameter paths consist of them.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{Branches, Linear, Mamba2, RmsNorm, TensorParallel, add, relu_squared};
use pipewright::stage::StageContext;
use pipewright_shapes::nemotron_h::{BlockKind, NemotronHConfig};

use super::experts::ExpertMixer;
use super::sizes::mamba_sizes;
use crate::attention::{Attention, AttentionBias, AttentionSizes};
use crate::block_cache::BlockCache;
use crate::mamba::{MambaBiases, build_mamba};
use crate::parameter::{Builder, ParameterSource, SplitLinear};
use crate::split::require_parts;

/// `x + mixer(norm(x))`.
#[derive(Module, Debug)]
pub(super) struct Block {
    norm: RmsNorm,
    mixer: Mixer,
    /// The width of a head of the attention.
    #[module(skip)]
    head_dim: usize,
}

/// The names of the variants are in Burn's parameter paths and not in a Hugging Face directory; see
/// [`crate::parameter`].
#[expect(clippy::large_enum_variant, reason = "a block has one mixer, and its parameters are elsewhere")]
#[derive(Module, Debug)]
enum Mixer {
    Mamba(Mamba2),
    Attention(Attention),
    Mlp(FeedForward),
    Experts(ExpertMixer),
}

impl Block {
    pub(super) fn build<S: ParameterSource>(
        config: &NemotronHConfig,
        kind: BlockKind,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let norm = builder.norm(&format!("{path}.norm"), config.hidden_size, config.layer_norm_epsilon)?;
        let path = format!("{path}.mixer");
        let mixer = match kind {
            // Every rank computes the whole mixer.
            BlockKind::Mamba => {
                let biases = MambaBiases { projections: config.use_bias, convolution: config.use_conv_bias };
                Mixer::Mamba(build_mamba(mamba_sizes(config), config.hidden_size, biases, &path, builder)?)
            }
            BlockKind::Attention => {
                let (sizes, bias) = (AttentionSizes::from(config), AttentionBias::default());
                Mixer::Attention(Attention::build(sizes, bias, None, &path, builder)?)
            }
            BlockKind::Mlp => {
                let size = ("intermediate_size", config.intermediate_size);
                require_parts(&path, "up_proj.weight", size, builder.tensor_ranks())?;
                Mixer::Mlp(FeedForward::build(config, &path, builder)?)
            }
            BlockKind::Experts => Mixer::Experts(ExpertMixer::build(config, &path, builder)?),
        };
        Ok(Self { norm, mixer, head_dim: config.head_dim })
    }

    /// Maps hidden states `[batch * sequence, hidden]` to hidden states of the same shape. `scan` runs a Mamba-2
    /// layer, and `attend` an attention whose heads have an even number of channels.
    pub(super) fn forward(
        &self,
        hidden: Tensor<2>,
        sequence: usize,
        scan: impl FnOnce(&Mamba2, Tensor<2>) -> Tensor<2>,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let hidden = Branches::new(hidden);
        let x = self.norm.forward(hidden.branch());
        let mixed = match &self.mixer {
            Mixer::Mamba(mixer) => scan(mixer, x),
            Mixer::Attention(mixer) => {
                mixer.forward(x, tensor, |qkv| with_even_heads(self.head_dim, qkv, attend), context)
            }
            Mixer::Mlp(mixer) => mixer.forward(x, tensor),
            Mixer::Experts(mixer) => mixer.forward(x, sequence, tensor, context),
        };
        add(hidden.into_branch(), mixed)
    }

    /// Maps the hidden states `[tokens, hidden]` of the next tokens of a row to hidden states of the same
    /// shape.
    pub(super) fn extend(
        &self,
        hidden: Tensor<2>,
        cache: &mut BlockCache,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let (sequence, BlockCache { keys_values, mamba }) = (hidden.dims()[0], cache);
        let scan = |mixer: &Mamba2, x| mixer.extend(x, mamba);
        let attend = |[q, k, v]: [Tensor<2>; 3]| keys_values.attend(q, k, v);
        self.forward(hidden, sequence, scan, attend, tensor, context)
    }
}

/// Runs an attention whose heads have `head_dim` channels; see [`Attention::forward`]. `attend` takes heads
/// of the next even width. A channel of zeros changes no score, and the attention divides the scores by the
/// root of the larger width.
fn with_even_heads(
    head_dim: usize,
    [q, k, v]: [Tensor<2>; 3],
    attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
) -> Tensor<2> {
    if head_dim.is_multiple_of(2) {
        return attend([q, k, v]);
    }
    let width = head_dim as f64;
    let q = q.mul_scalar(((width + 1.0) / width).sqrt());
    let [q, k, v] = [q, k, v].map(|x| with_zeros(x, head_dim));
    without_zeros(attend([q, k, v]), head_dim)
}

/// Adds a channel of zeros to each head of `[tokens, heads * head_dim]`.
fn with_zeros(x: Tensor<2>, head_dim: usize) -> Tensor<2> {
    let [tokens, width] = x.dims();
    let heads = width / head_dim;
    let x = x.reshape([tokens * heads, head_dim]);
    let zeros = x.clone().narrow(1, 0, 1).zeros_like();
    Tensor::cat(vec![x, zeros], 1).reshape([tokens, heads * (head_dim + 1)])
}

/// Removes the last channel of each head of `[tokens, heads * (head_dim + 1)]`.
fn without_zeros(x: Tensor<2>, head_dim: usize) -> Tensor<2> {
    let [tokens, width] = x.dims();
    let heads = width / (head_dim + 1);
    let x = x.reshape([tokens * heads, head_dim + 1]);
    x.narrow(1, 0, head_dim).reshape([tokens, heads * head_dim])
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
