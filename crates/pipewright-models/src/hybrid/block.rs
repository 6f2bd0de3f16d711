//! The blocks. Fields have the names in a checkpoint, because parameter paths consist of them.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright::nn::{
    AttentionForm, Branches, Expert, Linear, Mamba2, RmsNorm, ScopedAttention, TensorParallel, add,
};
use pipewright::stage::StageContext;
use pipewright::tensor::Placement;
use pipewright_shapes::hybrid::{BlockKind, HybridConfig};

use super::depths::{Choice, Depths};
use super::experts::ExpertMixer;
use super::sizes::{mamba_sizes, scoped_attention};
use super::tokens::Tokens;
use crate::attention::{Attention, AttentionBias, AttentionSizes};
use crate::block_cache::BlockCache;
use crate::mamba::{MambaBiases, build_mamba};
use crate::parameter::{Builder, ParameterKind, ParameterSource};
use crate::split::require_parts;

/// `x + mixer(norm(x))`, for all tokens or for the tokens that a router chooses.
#[derive(Module, Debug)]
pub(super) struct Block {
    norm: RmsNorm,
    mixer: Mixer,
    /// The table of the relations, in a block of attention.
    relation: Option<RelationCopy>,
    mod_router: Option<Linear>,
    /// How tokens attend to each other, in a block of attention.
    #[module(skip)]
    attention: ScopedAttention,
    #[module(skip)]
    depths: Depths,
}

/// The names of the variants are in Burn's parameter paths and not in the checkpoint's; see
/// [`crate::parameter`].
#[expect(clippy::large_enum_variant, reason = "a block has one mixer, and its parameters are elsewhere")]
#[derive(Module, Debug)]
enum Mixer {
    Mamba(Mamba2),
    Attention(Attention),
    Mlp(Expert),
    Experts(ExpertMixer),
}

/// An attention's copy of the table of the relations, `[relations, heads]`. Each attention has its own, so
/// that the sum of their gradients does not depend on the cut. A model directory does not hold them.
#[derive(Module, Debug)]
pub(super) struct RelationCopy {
    weight: Param<Tensor<2>>,
}

/// The path of the table of the relations.
pub(super) const RELATION_BIAS: &str = "model.relation_bias";

/// Builds the table of the relations, which is split by the heads.
pub(super) fn relation_table<S: ParameterSource>(
    config: &HybridConfig,
    builder: &mut Builder<'_, S>,
) -> Result<Param<Tensor<2>>, S::Error> {
    let (heads, ranks) = (config.num_attention_heads, builder.tensor_ranks());
    require_parts(RELATION_BIAS, "weight", ("num_attention_heads", heads), ranks)?;
    let shape = [config.num_relations, heads];
    builder.placed(RELATION_BIAS, "weight", shape, ParameterKind::Scale, Placement::split(1, ranks))
}

impl Block {
    /// Builds the block `index` of the model.
    pub(super) fn build<S: ParameterSource>(
        config: &HybridConfig,
        index: usize,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let path = format!("model.layers.{index}");
        let mut block =
            Self::of_kind(config, config.blocks()[index], scoped_attention(config, index), &path, builder)?;
        if config.blocks()[index] == BlockKind::Attention && config.num_relations > 0 {
            block.relation = Some(RelationCopy { weight: relation_table(config, builder)? });
        }
        if config.mod_layers.contains(&index) {
            let router = builder.linear(&format!("{path}.mod_router"), config.hidden_size, 1)?;
            block.mod_router = Some(router);
        }
        Ok(block)
    }

    /// Builds a block that all tokens pass.
    pub(super) fn of_kind<S: ParameterSource>(
        config: &HybridConfig,
        kind: BlockKind,
        attention: ScopedAttention,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let hidden = config.hidden_size;
        let norm = builder.norm(&format!("{path}.norm"), hidden, config.rms_norm_eps)?;
        let block = path.to_owned();
        let path = format!("{path}.mixer");
        let mixer = match kind {
            // Every rank computes the whole mixer.
            BlockKind::Mamba => {
                let biases = MambaBiases { projections: false, convolution: true };
                Mixer::Mamba(build_mamba(mamba_sizes(config), hidden, biases, &path, builder)?)
            }
            BlockKind::Attention => {
                let (sizes, bias) = (AttentionSizes::from(config), AttentionBias::default());
                Mixer::Attention(Attention::build(sizes, bias, None, &path, builder)?)
            }
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
        Ok(Self { norm, mixer, relation: None, mod_router: None, attention, depths })
    }

    /// Maps hidden states `[tokens, hidden]` to hidden states of the same shape. `choice` says how a router
    /// chooses the tokens that go through the block.
    pub(super) fn forward(
        &self,
        x: Tensor<2>,
        (tokens, choice): (&Tokens, Choice),
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let branch = |x: Tensor<2>, tokens: &Tokens| {
            let scope = &tokens.scope;
            let scan = |mixer: &Mamba2, x| mixer.forward(x, scope.sequence, Some(&scope.documents));
            let attend = |qkv| {
                let table = self.relation.as_ref().map(|table| table.weight.val());
                let relations = tokens.relations.as_ref().zip(table);
                self.attention.forward(qkv, scope, relations)
            };
            self.mix(x, tokens, scan, attend, tensor, context)
        };
        match &self.mod_router {
            Some(router) => self.depths.forward((router, choice), x, tokens, context, branch),
            None => {
                let x = Branches::new(x);
                let mixed = branch(x.branch(), tokens);
                add(x.into_branch(), mixed)
            }
        }
    }

    /// Returns the empty cache of the block.
    pub(super) fn cache(&self) -> BlockCache {
        let ScopedAttention { head_dim, rope_theta, window } = self.attention;
        let form = match rope_theta {
            Some(theta) => AttentionForm::rotary(head_dim, theta),
            None => AttentionForm::without_positions(head_dim),
        };
        BlockCache::new(AttentionForm { window, ..form })
    }

    /// Maps the hidden states `[tokens, hidden]` of the next tokens of a document to hidden states of the
    /// same shape. The cache has the earlier tokens that went through the block.
    pub(super) fn extend(
        &self,
        x: Tensor<2>,
        cache: &mut BlockCache,
        tokens: &Tokens,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let BlockCache { keys_values, mamba } = cache;
        let scan = |mixer: &Mamba2, x| mixer.extend(x, mamba);
        let Some(router) = &self.mod_router else {
            let attend = |[q, k, v]: [Tensor<2>; 3]| keys_values.attend(q, k, v);
            return add(x.clone(), self.mix(x, tokens, scan, attend, tensor, context));
        };
        let branch = |x: Tensor<2>, tokens: &Tokens| {
            let (scope, positions) = (&tokens.scope, &tokens.scope.positions);
            let attend = |[q, k, v]: [Tensor<2>; 3]| {
                if keys_values.tokens() > 0 {
                    return keys_values.attend_at(q, k, v, positions);
                }
                // All tokens at once are computed as in training, in blocks.
                keys_values.append_at(&k, &v, positions);
                self.attention.forward([q, k, v], scope, None)
            };
            self.mix(x, tokens, scan, attend, tensor, context)
        };
        self.depths.forward((router, Choice::Positive), x, tokens, context, branch)
    }

    /// Runs the norm and the mixer. `scan` runs a Mamba-2 layer, and `attend` an attention.
    fn mix(
        &self,
        x: Tensor<2>,
        tokens: &Tokens,
        scan: impl FnOnce(&Mamba2, Tensor<2>) -> Tensor<2>,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let x = self.norm.forward(x);
        match &self.mixer {
            Mixer::Mamba(mixer) => scan(mixer, x),
            Mixer::Attention(mixer) => mixer.forward(x, tensor, attend, context),
            Mixer::Mlp(mixer) => tensor.sum(mixer.forward(tensor.enter(x))),
            Mixer::Experts(mixer) => mixer.forward(x, tokens, tensor, context),
        }
    }
}
