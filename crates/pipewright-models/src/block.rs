//! The blocks of all families: attention, feed-forward layers, mixtures and state spaces, each added to the hidden
//! states.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{
    AttentionForm, Branches, CausalAttention, DeltaCache, Expert, KeyValueCache, MambaCache, ScopedAttention,
    add,
};
use pipewright::stage::StageContext;

use crate::attention::Attention;
use crate::decoder::{BlockAttentions, FeedForward, scaled};
use crate::delta::GatedDelta;
use crate::hybrid::{Depths, ExpertMixer, RelationCopy, Tokens};
use crate::latent_attention::LatentAttention;
use crate::mamba::MambaMixer;
use crate::nemotron_h::{LatentExperts, RectifiedLayer};
use crate::norm::Norm;
use crate::rows::Rows;

/// A block: its branches follow each other.
#[derive(Module, Debug)]
pub(crate) struct Block {
    pub(crate) branches: Vec<Branch>,
}

/// `x + factor * norm_after(mixer(norm(x)))`, for all tokens or for the tokens that a router chooses.
#[derive(Module, Debug)]
pub(crate) struct Branch {
    pub(crate) norm: Option<Norm>,
    pub(crate) mixer: Mixer,
    pub(crate) norm_after: Option<Norm>,
    /// The table of the relations, in an attention of a hybrid.
    pub(crate) relation: Option<RelationCopy>,
    /// The router that chooses the tokens.
    pub(crate) depths: Option<Depths>,
    /// The path of the mixer; empty if it is not known.
    #[module(skip)]
    pub(crate) path: Arc<str>,
    /// How tokens attend to each other.
    #[module(skip)]
    pub(crate) attends: Attends,
    /// The factor of what is added to the hidden states.
    #[module(skip)]
    pub(crate) factor: f64,
}

/// The computation of a branch.
#[expect(clippy::large_enum_variant, reason = "a branch has one mixer, and its parameters are elsewhere")]
#[derive(Module, Debug)]
pub(crate) enum Mixer {
    Attention(Attention),
    Latent(LatentAttention),
    Mamba(MambaMixer),
    Delta(GatedDelta),
    /// A feed-forward layer of a decoder: dense, or a mixture.
    FeedForward(FeedForward),
    /// A gated layer without adapters.
    Gated(Expert),
    /// A layer without a gate.
    Rectified(RectifiedLayer),
    /// A mixture whose experts may have a width of their own.
    LatentExperts(LatentExperts),
    /// A mixture with the losses of the hybrid family.
    Experts(ExpertMixer),
}

/// How tokens attend to each other.
#[derive(Clone, Debug)]
pub(crate) enum Attends {
    /// As the attention of this block of the model, whose heads have `head_dim` channels.
    Causal { block: usize, head_dim: usize },
    /// To the earlier tokens of their document.
    Scoped(ScopedAttention),
}

/// The state that a block keeps of the tokens of a row. Only the part for its mixer is used; the others stay empty.
#[derive(Clone, Debug)]
pub(crate) struct BlockCache {
    pub(crate) keys_values: KeyValueCache,
    mamba: MambaCache,
    delta: DeltaCache,
}

impl Block {
    /// Maps hidden states `[tokens, hidden]` to hidden states of the same shape. With a cache, they are of the
    /// next tokens of a row, and the cache has the earlier tokens that went through the block.
    pub(crate) fn forward(
        &self,
        hidden: Tensor<2>,
        rows: &Rows<'_>,
        mut cache: Option<&mut BlockCache>,
    ) -> Tensor<2> {
        let forward = |x, branch: &Branch| branch.forward(x, rows, cache.as_deref_mut());
        self.branches.iter().fold(hidden, forward)
    }

    /// Returns the empty cache of the block for rows of `length` tokens.
    pub(crate) fn cache(&self, attentions: &BlockAttentions, length: usize) -> BlockCache {
        let form = match self.branches[0].attends {
            Attends::Causal { block, .. } => attentions.cached_form(block, &attentions.positions(length)),
            Attends::Scoped(ScopedAttention { head_dim, rope_theta, window }) => {
                let form = match rope_theta {
                    Some(theta) => AttentionForm::rotary(head_dim, theta),
                    None => AttentionForm::without_positions(head_dim),
                };
                AttentionForm { window, ..form }
            }
        };
        let (mamba, delta) = (MambaCache::default(), DeltaCache::default());
        BlockCache { keys_values: KeyValueCache::new(form), mamba, delta }
    }

    /// Returns whether the cache of the block can lose its last tokens. A state of all tokens cannot, and the
    /// tokens of a hybrid belong to documents.
    pub(crate) fn can_be_shortened(&self, cache: &BlockCache) -> bool {
        let can_be = |branch: &Branch| {
            let has_state = matches!(branch.mixer, Mixer::Mamba(_) | Mixer::Delta(_));
            matches!(branch.attends, Attends::Causal { .. }) && !has_state
        };
        self.branches.iter().all(can_be) && cache.keys_values.can_be_shortened()
    }
}

impl Branch {
    /// Returns a branch with a norm before the mixer.
    pub(crate) fn new(norm: Option<Norm>, mixer: Mixer, attends: Attends) -> Self {
        let path = Arc::default();
        Self { norm, mixer, norm_after: None, relation: None, depths: None, path, attends, factor: 1.0 }
    }

    fn forward(&self, x: Tensor<2>, rows: &Rows<'_>, cache: Option<&mut BlockCache>) -> Tensor<2> {
        if let (Some(depths), Some(tokens)) = (&self.depths, rows.tokens()) {
            let mix = |x: Tensor<2>, tokens: &Tokens| self.mix(x, Some(tokens), rows, cache);
            let y = depths.forward(rows.choice, x, tokens, rows.context, mix);
            return rows.context.watched(&self.path, y);
        }
        let x = Branches::new(x);
        let mixed = self.mix(x.branch(), rows.tokens(), rows, cache);
        rows.context.watched(&self.path, add(x.into_branch(), scaled(mixed, self.factor)))
    }

    /// Runs the norms and the mixer. `tokens` are those of `x` in a hybrid.
    fn mix(
        &self,
        x: Tensor<2>,
        tokens: Option<&Tokens>,
        rows: &Rows<'_>,
        cache: Option<&mut BlockCache>,
    ) -> Tensor<2> {
        let (tensor, context) = (&rows.split.tensor, rows.context);
        let x = normalised(x, self.norm.as_ref());
        let mixed = match &self.mixer {
            Mixer::Attention(mixer) => {
                let attend = |qkv| self.attend(qkv, mixer.sinks(), tokens, rows, cache);
                mixer.forward(x, &tensor.region(rows.shape[0]), attend, context)
            }
            Mixer::Latent(mixer) => match cache {
                None => mixer.forward(x, tensor, |qkv| self.attend(qkv, None, tokens, rows, None), context),
                Some(BlockCache { keys_values, .. }) if keys_values.tokens() == 0 && x.dims()[0] > 1 => {
                    let keep = |keys, latents| keys_values.append(&keys, &latents);
                    let attend = |qkv| self.attend(qkv, None, tokens, rows, None);
                    mixer.forward_first(x, tensor, attend, keep, context)
                }
                Some(BlockCache { keys_values, .. }) => {
                    let attend = |[q, k, v]: [Tensor<2>; 3]| keys_values.attend(q, k, v);
                    mixer.forward_latent(x, tensor, attend, context)
                }
            },
            Mixer::Mamba(mixer) => {
                let sequences = match tokens {
                    Some(Tokens { scope, .. }) => (scope.sequence, Some(&scope.documents)),
                    None => (rows.shape[1], rows.scope().map(|scope| &scope.documents)),
                };
                mixer.forward(x, sequences, cache.map(|cache| &mut cache.mamba), context)
            }
            Mixer::Delta(mixer) => {
                let documents = rows.scope().map(|scope| &scope.documents);
                let cache = cache.map(|cache| &mut cache.delta);
                mixer.forward(x, (rows.shape[1], documents), cache, context)
            }
            Mixer::FeedForward(mixer) => mixer.forward(x, rows.shape[0], tensor, context),
            Mixer::Gated(mixer) => tensor.sum(mixer.forward(tensor.enter(x))),
            Mixer::Rectified(mixer) => mixer.forward(x, tensor),
            Mixer::LatentExperts(mixer) => mixer.forward(x, rows.shape[0], tensor, context),
            Mixer::Experts(mixer) => {
                let tokens = tokens.expect("a hybrid has tokens");
                mixer.forward(x, tokens, tensor, context)
            }
        };
        normalised(mixed, self.norm_after.as_ref())
    }

    /// Returns the values that the queries attend to.
    fn attend(
        &self,
        [q, k, v]: [Tensor<2>; 3],
        sinks: Option<Tensor<1>>,
        tokens: Option<&Tokens>,
        rows: &Rows<'_>,
        cache: Option<&mut BlockCache>,
    ) -> Tensor<2> {
        let (q, cache) = (rows.grown(q), cache.map(|cache| &mut cache.keys_values));
        match (&self.attends, cache, tokens) {
            (Attends::Causal { head_dim, .. }, Some(cache), _) => {
                with_even_heads(*head_dim, [q, k, v], |[q, k, v]| cache.attend_with(q, k, v, sinks))
            }
            (Attends::Causal { block, head_dim }, None, _) => {
                let attention = rows.attention(*block).with_sinks(sinks);
                with_even_heads(*head_dim, [q, k, v], |[q, k, v]| {
                    if rows.context.slice().1.is_one() {
                        attention.forward(q, k, v)
                    } else {
                        attend_to_slices(&attention, [q, k, v], rows.shape, *block, rows.context)
                    }
                })
            }
            (Attends::Scoped(attention), None, Some(tokens)) => {
                let table = self.relation.as_ref().map(RelationCopy::table);
                let relations = tokens.relations.as_ref().zip(table);
                attention.forward([q, k, v], &tokens.scope, relations)
            }
            (Attends::Scoped(attention), Some(cache), Some(tokens)) if self.depths.is_some() => {
                let positions = &tokens.scope.positions;
                if cache.tokens() > 0 {
                    return cache.attend_at(q, k, v, positions);
                }
                // All tokens at once are computed as in training, in blocks.
                cache.append_at(&k, &v, positions);
                attention.forward([q, k, v], &tokens.scope, None)
            }
            (Attends::Scoped(_), Some(cache), _) => cache.attend(q, k, v),
            (Attends::Scoped(_), None, None) => unreachable!("only a hybrid attends in a scope"),
        }
    }
}

fn normalised(x: Tensor<2>, norm: Option<&Norm>) -> Tensor<2> {
    match norm {
        Some(norm) => norm.forward(x),
        None => x,
    }
}

/// Runs the attention of a block for a slice: over the keys and values of this slice and of those before it.
fn attend_to_slices(
    attention: &CausalAttention,
    inputs: [Tensor<2>; 3],
    [batch, length]: [usize; 2],
    block: usize,
    context: &StageContext,
) -> Tensor<2> {
    let [q, k, v] = inputs.map(|x| {
        let width = x.dims()[1];
        x.reshape([batch, length, width])
    });
    let up_to_this = |what: &str, own: Tensor<3>| {
        let name = format!("model.layers.{block}.self_attn.{what}");
        let mut slices = context.earlier_slices(&name);
        context.keep_for_later_slices(&name, &own);
        slices.push(own);
        slices
    };
    let attended = attention.forward_slice(q, up_to_this("keys", k), up_to_this("values", v));
    let width = attended.dims()[2];
    attended.reshape([batch * length, width])
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
