//! A decoder block. Fields have the names in a Hugging Face directory, because parameter paths consist of
//! them.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{RmsNorm, TensorParallel};
use pipewright::stage::StageContext;

use super::config::DecoderConfig;
use super::feed_forward::FeedForward;
use super::form::BlockForm;
use crate::attention::Attention;
use crate::parameter::{Builder, ParameterSource};

#[derive(Module, Debug)]
pub(super) struct DecoderBlock {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
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
            builder.norm(&format!("{path}.{name}"), config.hidden_size, config.rms_norm_eps)
        };
        Ok(Self {
            input_layernorm: norm(builder, "input_layernorm")?,
            self_attn: attention(config, form, &format!("{path}.self_attn"), builder)?,
            post_attention_layernorm: norm(builder, "post_attention_layernorm")?,
            mlp: FeedForward::build(config, form, index, &format!("{path}.mlp"), builder)?,
            residual: form.factors.residual,
        })
    }

    /// Returns the path of the block's mixture if its balance loss is part of the training loss.
    pub(super) fn balanced(&self) -> Option<&str> {
        self.mlp.balanced()
    }

    /// Maps hidden states `[rows * sequence, hidden]` to hidden states of the same shape. `attend` takes
    /// queries, keys and values of this rank's heads and returns what the queries attend to.
    pub(super) fn forward(
        &self,
        hidden: Tensor<2>,
        rows: usize,
        attend: impl FnOnce([Tensor<2>; 3]) -> Tensor<2>,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let attended =
            self.self_attn.forward(self.input_layernorm.forward(hidden.clone()), tensor, attend, context);
        let hidden = hidden + scaled(attended, self.residual);
        let normalised = self.post_attention_layernorm.forward(hidden.clone());
        let transformed = self.mlp.forward(normalised, rows, tensor, context);
        hidden + scaled(transformed, self.residual)
    }
}

fn attention<S: ParameterSource>(
    config: &DecoderConfig,
    form: &BlockForm<'_>,
    path: &str,
    builder: &mut Builder<'_, S>,
) -> Result<Attention, S::Error> {
    if form.joins_projections {
        return Attention::build_joined(config.attention(), path, builder);
    }
    let norm_epsilon = form.normalises_heads.then_some(config.rms_norm_eps);
    Attention::build(config.attention(), form.bias, norm_epsilon, path, builder)
}

/// Returns a tensor times a factor.
pub(super) fn scaled<const D: usize>(x: Tensor<D>, factor: f64) -> Tensor<D> {
    if factor == 1.0 { x } else { x * factor }
}
