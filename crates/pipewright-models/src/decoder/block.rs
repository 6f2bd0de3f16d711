//! A decoder block. Fields have the names in a Hugging Face directory, because parameter paths consist of
//! them.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{Branches, CausalAttention, KeyValueCache, TensorParallel, add};
use pipewright::stage::StageContext;
use pipewright_shapes::decoder::DecoderConfig;

use super::feed_forward::FeedForward;
use super::form::{BlockForm, HeadNorms, NormPlaces};
use crate::attention::{Attention, AttentionSizes, InputNorms};
use crate::latent_attention::LatentAttention;
use crate::norm::Norm;
use crate::parameter::{Builder, ParameterSource};

/// The attention of a block. The names of the variants are in Burn's parameter paths and not in a Hugging
/// Face directory; see [`crate::parameter`].
#[expect(clippy::large_enum_variant, reason = "a block has one attention, and its parameters are elsewhere")]
#[derive(Module, Debug)]
enum SelfAttention {
    Attention(Attention),
    Latent(LatentAttention),
}

#[derive(Module, Debug)]
pub(super) struct DecoderBlock {
    /// Before the attention.
    input_layernorm: Option<Norm>,
    self_attn: SelfAttention,
    /// After the attention, or before the feed-forward layer if it is the only norm between them.
    post_attention_layernorm: Norm,
    /// Before the feed-forward layer, in blocks with norms before and after it.
    pre_feedforward_layernorm: Option<Norm>,
    mlp: FeedForward,
    /// After the feed-forward layer.
    post_feedforward_layernorm: Option<Norm>,
    #[module(skip)]
    norms: NormPlaces,
    /// The factor of what is added to the hidden states.
    #[module(skip)]
    residual: f64,
}

impl DecoderBlock {
    pub(super) fn build<S: ParameterSource>(
        config: &DecoderConfig,
        form: &BlockForm<'_>,
        index: usize,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let norm = |builder: &mut Builder<'_, S>, name: &str| {
            builder.form_norm(&format!("{path}.{name}"), config.hidden_size, form.norm(config))
        };
        let norm_if = |has_norm: bool, builder: &mut Builder<'_, S>, name: &str| {
            has_norm.then(|| norm(builder, name)).transpose()
        };
        let norms = form.norms;
        Ok(Self {
            input_layernorm: norm_if(norms != NormPlaces::After, builder, "input_layernorm")?,
            self_attn: attention(config, form, &format!("{path}.self_attn"), builder)?,
            post_attention_layernorm: norm(builder, "post_attention_layernorm")?,
            pre_feedforward_layernorm: norm_if(
                norms == NormPlaces::Both,
                builder,
                "pre_feedforward_layernorm",
            )?,
            mlp: FeedForward::build(config, form, index, &format!("{path}.mlp"), builder)?,
            post_feedforward_layernorm: norm_if(
                norms != NormPlaces::Before,
                builder,
                "post_feedforward_layernorm",
            )?,
            norms,
            residual: form.factors.residual,
        })
    }

    /// Returns the path of the router of the block's mixture if its balance loss is part of the training
    /// loss.
    pub(super) fn balanced(&self) -> Option<&str> {
        self.mlp.balanced()
    }

    /// Maps hidden states `[rows * sequence, hidden]` to hidden states of the same shape. `attend` takes
    /// queries, keys and values of this rank's heads, with the sinks of heads that have some, and returns
    /// what the queries attend to.
    pub(super) fn forward(
        &self,
        hidden: Tensor<2>,
        rows: usize,
        attend: impl FnOnce([Tensor<2>; 3], Option<Tensor<1>>) -> Tensor<2>,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let attention = |input| match &self.self_attn {
            SelfAttention::Attention(attention) => {
                let attend = |inputs| attend(inputs, attention.sinks());
                attention.forward(input, tensor, attend, context)
            }
            SelfAttention::Latent(attention) => {
                attention.forward(input, tensor, |inputs| attend(inputs, None), context)
            }
        };
        self.transform(hidden, rows, attention, tensor, context)
    }

    /// Maps the hidden states of the next tokens of a sequence, whose earlier tokens are in `cache`. An
    /// attention with latents keeps these there in place of keys and values. `whole` returns the attention
    /// over these tokens alone, which computes the first ones of a sequence.
    pub(super) fn forward_cached(
        &self,
        hidden: Tensor<2>,
        cache: &mut KeyValueCache,
        whole: impl FnOnce() -> Arc<CausalAttention>,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let attention = |input: Tensor<2>| match &self.self_attn {
            SelfAttention::Attention(attention) => {
                let attend = |[q, k, v]: [Tensor<2>; 3]| cache.attend_with(q, k, v, attention.sinks());
                attention.forward(input, tensor, attend, context)
            }
            SelfAttention::Latent(attention) if cache.tokens() == 0 && input.dims()[0] > 1 => {
                let keep = |keys, latents| cache.append(&keys, &latents);
                let attend = |[q, k, v]: [Tensor<2>; 3]| whole().forward(q, k, v);
                attention.forward_first(input, tensor, attend, keep, context)
            }
            SelfAttention::Latent(attention) => {
                let attend = |[q, k, v]: [Tensor<2>; 3]| cache.attend(q, k, v);
                attention.forward_latent(input, tensor, attend, context)
            }
        };
        self.transform(hidden, 1, attention, tensor, context)
    }

    fn transform(
        &self,
        hidden: Tensor<2>,
        rows: usize,
        attention: impl FnOnce(Tensor<2>) -> Tensor<2>,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let hidden = Branches::new(hidden);
        let input = normalised(hidden.branch(), self.input_layernorm.as_ref());
        let between = Some(&self.post_attention_layernorm);
        let (after_attention, before_mlp) = match self.norms {
            NormPlaces::Before => (None, between),
            NormPlaces::After => (between, None),
            NormPlaces::Both => (between, self.pre_feedforward_layernorm.as_ref()),
        };
        let attended = normalised(attention(input), after_attention);
        let hidden = Branches::new(add(hidden.into_branch(), scaled(attended, self.residual)));
        let transformed = self.mlp.forward(normalised(hidden.branch(), before_mlp), rows, tensor, context);
        let transformed = normalised(transformed, self.post_feedforward_layernorm.as_ref());
        add(hidden.into_branch(), scaled(transformed, self.residual))
    }
}

fn normalised(x: Tensor<2>, norm: Option<&Norm>) -> Tensor<2> {
    match norm {
        Some(norm) => norm.forward(x),
        None => x,
    }
}

fn attention<S: ParameterSource>(
    config: &DecoderConfig,
    form: &BlockForm<'_>,
    path: &str,
    builder: &mut Builder<'_, S>,
) -> Result<SelfAttention, S::Error> {
    let sizes = AttentionSizes::from(config);
    if let Some(latent) = form.latent {
        return LatentAttention::build(sizes, latent, form.bias, path, builder).map(SelfAttention::Latent);
    }
    if form.joins_projections {
        return Attention::build_joined(sizes, form.bias, path, builder).map(SelfAttention::Attention);
    }
    let joins_heads = form.head_norms == HeadNorms::All;
    let norms = InputNorms { form: form.norm(config), joins_heads };
    let norms = (form.head_norms != HeadNorms::None).then_some(norms);
    let attention = Attention::build(sizes, form.bias, norms, path, builder)?;
    let attention = if form.has_sinks { attention.with_sinks(sizes, path, builder)? } else { attention };
    Ok(SelfAttention::Attention(attention))
}

/// Returns a tensor times a factor.
pub(super) fn scaled<const D: usize>(x: Tensor<D>, factor: f64) -> Tensor<D> {
    if factor == 1.0 { x } else { x * factor }
}
