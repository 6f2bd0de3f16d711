//! The blocks. Field names are those of the checkpoint, because parameter paths consist of them.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright::nn::{Expert, Linear, Mamba2, RmsNorm, ScopedAttention, TensorParallel};
use pipewright::stage::StageContext;
use pipewright::tensor::Placement;

use super::config::HybridConfig;
use super::depths::Depths;
use super::experts::ExpertMixer;
use super::pattern::BlockKind;
use super::tokens::Tokens;
use crate::error::ConfigError;
use crate::mamba::build_mamba;
use crate::parameter::{Builder, ParameterKind, ParameterSource, SplitLinear};
use crate::split::{head_shards, require_parts};

/// `x + mixer(norm(x))`, for all tokens or for those that a router chooses.
#[derive(Module, Debug)]
pub(super) struct Block {
    norm: RmsNorm,
    mixer: Mixer,
    mod_router: Option<Linear>,
    #[module(skip)]
    depths: Depths,
}

/// The names of the variants are in Burn's parameter paths and not in the checkpoint's; see [`crate::parameter`].
#[derive(Module, Debug)]
enum Mixer {
    Mamba(Mamba2),
    Attention(Attention),
    Mlp(Expert),
    Experts(ExpertMixer),
}

#[derive(Module, Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    relation: Option<RelationCopy>,
    #[module(skip)]
    attention: ScopedAttention,
}

/// An attention's copy of the table of the relations, `[relations, heads]`. Each attention has its own, so that the sum
/// of their gradients does not depend on the cut. A model directory does not hold them.
#[derive(Module, Debug)]
pub(super) struct RelationCopy {
    weight: Param<Tensor<2>>,
}

/// The path of the table of the relations.
pub(super) const RELATION_BIAS: &str = "model.relation_bias";

/// Builds the table of the relations, which is split by the heads.
pub(super) fn relation_table<S>(
    config: &HybridConfig,
    builder: &mut Builder<'_, S>,
) -> Result<Param<Tensor<2>>, S::Error>
where
    S: ParameterSource,
    S::Error: From<ConfigError>,
{
    let (heads, ranks) = (config.num_attention_heads, builder.tensor_ranks());
    require_parts(RELATION_BIAS, "weight", ("num_attention_heads", heads), ranks)?;
    let shape = [config.num_relations, heads];
    builder.placed(RELATION_BIAS, "weight", shape, ParameterKind::Scale, Placement::split(1, ranks))
}

impl Block {
    /// Builds the block at a place of the model.
    pub(super) fn build<S>(
        config: &HybridConfig,
        index: usize,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        let path = format!("model.layers.{index}");
        let mut block =
            Self::of_kind(config, config.blocks()[index], config.attention(index), &path, builder)?;
        if let Mixer::Attention(mixer) = &mut block.mixer
            && config.num_relations > 0
        {
            mixer.relation = Some(RelationCopy { weight: relation_table(config, builder)? });
        }
        if config.mod_layers.contains(&index) {
            let router = builder.linear(&format!("{path}.mod_router"), config.hidden_size, 1)?;
            block.mod_router = Some(router);
        }
        Ok(block)
    }

    /// Builds a block that all tokens pass.
    pub(super) fn of_kind<S>(
        config: &HybridConfig,
        kind: BlockKind,
        attention: ScopedAttention,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        let hidden = config.hidden_size;
        let norm = builder.norm(&format!("{path}.norm"), hidden, config.rms_norm_eps)?;
        let block = path.to_owned();
        let path = format!("{path}.mixer");
        let mixer = match kind {
            // Every rank computes the whole mixer.
            BlockKind::Mamba => {
                Mixer::Mamba(build_mamba(config.mamba(), hidden, (false, true), &path, builder)?)
            }
            BlockKind::Attention => Mixer::Attention(Attention::build(config, attention, &path, builder)?),
            BlockKind::Dense => {
                let inner = config.intermediate_size;
                let size = ("intermediate_size", inner);
                require_parts(&path, "gate_proj.weight", size, builder.tensor_ranks())?;
                Mixer::Mlp(builder.split_expert(&path, [hidden, inner], true)?)
            }
            BlockKind::Experts => Mixer::Experts(ExpertMixer::build(config, &path, builder)?),
        };
        let depths = Depths {
            path: block,
            capacity: config.mod_capacity_factor,
            weight: config.mod_aux_loss_weight,
            share: 1.0 / config.mod_layers.len().max(1) as f64,
        };
        Ok(Self { norm, mixer, mod_router: None, depths })
    }

    /// Maps hidden states `[tokens, hidden]` to hidden states of the same shape.
    pub(super) fn forward(
        &self,
        x: Tensor<2>,
        tokens: &Tokens,
        (tensor, context): (&TensorParallel, &StageContext),
    ) -> Tensor<2> {
        let branch = |x: Tensor<2>, tokens: &Tokens| {
            let x = self.norm.forward(x);
            match &self.mixer {
                Mixer::Mamba(mixer) => mixer.forward(x, tokens.scope.sequence, Some(&tokens.scope.documents)),
                Mixer::Attention(mixer) => mixer.forward(x, tokens, tensor),
                Mixer::Mlp(mixer) => tensor.sum(mixer.forward(tensor.enter(x))),
                Mixer::Experts(mixer) => mixer.forward(x, tokens, (tensor, context)),
            }
        };
        match &self.mod_router {
            Some(router) => self.depths.forward(router, x, tokens, context, branch),
            None => x.clone() + branch(x, tokens),
        }
    }
}

impl Attention {
    fn build<S>(
        config: &HybridConfig,
        attention: ScopedAttention,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim());
        let (heads, key_heads) = (config.num_attention_heads, config.kv_heads());
        let (queries, keys) = (heads * head_dim, key_heads * head_dim);
        let [heads, key_heads] = head_shards(path, heads, key_heads, builder.tensor_ranks())?;
        let mut linear =
            |name: &str, sizes, split| builder.split_linear(false, &format!("{path}.{name}"), sizes, split);
        Ok(Self {
            q_proj: linear("q_proj", [hidden, queries], SplitLinear::Outputs { shards: heads })?,
            k_proj: linear("k_proj", [hidden, keys], SplitLinear::Outputs { shards: key_heads })?,
            v_proj: linear("v_proj", [hidden, keys], SplitLinear::Outputs { shards: key_heads })?,
            o_proj: linear("o_proj", [queries, hidden], SplitLinear::Inputs)?,
            relation: None,
            attention,
        })
    }

    fn forward(&self, x: Tensor<2>, tokens: &Tokens, tensor: &TensorParallel) -> Tensor<2> {
        let x = tensor.enter(x);
        let table = self.relation.as_ref().map(|table| table.weight.val());
        let q = self.q_proj.forward(x.clone());
        let k = self.k_proj.forward(x.clone());
        let v = self.v_proj.forward(x);
        let relations = tokens.relations.as_ref().zip(table);
        let heads = self.attention.forward([q, k, v], &tokens.scope, relations);
        self.o_proj.forward_split_inputs(heads, tensor)
    }
}
