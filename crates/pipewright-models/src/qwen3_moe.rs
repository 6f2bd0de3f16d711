//! The Qwen3-MoE family: Qwen3 with a mixture of experts in place of some feed-forward layers. Keys have the
//! names and the meaning of Hugging Face's `Qwen3MoeForCausalLM`.
//!
//! The balance loss of the router is defined per layer and microbatch, so that each stage can compute its
//! part: the training loss is the cross entropy plus `router_aux_loss_coef` times the mean over microbatches
//! and over the layers with experts of [`Routing::balance_loss`](pipewright::nn::Routing::balance_loss).
//! Hugging Face's library instead pools the routers of all layers over the whole batch, which gives another
//! number. The loss counts only if `output_router_logits` is true; reports have it, without its coefficient,
//! as `moe_aux`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, LayerForm, LayerWindows, MixtureConfig, QueryKeyNorm};
use crate::decoder_family::DecoderFamily;

/// A Qwen3-MoE model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen3MoeConfig {
    /// Sizes and constants. `intermediate_size` is for layers without experts.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// Whether the four linear layers of the attention have a bias. Published Qwen3-MoE models have no such
    /// bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// The window, which all layers have.
    #[serde(flatten)]
    pub windows: LayerWindows,
    /// The experts.
    #[serde(flatten)]
    pub mixture: MixtureConfig,
}

impl From<DecoderConfig> for Qwen3MoeConfig {
    fn from(decoder: DecoderConfig) -> Self {
        let mixture = MixtureConfig::of_width(decoder.intermediate_size);
        Self { decoder, attention_bias: false, windows: LayerWindows::default(), mixture }
    }
}

impl DecoderFamily for Qwen3MoeConfig {
    const ROW: Family = family::QWEN3_MOE;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let window = self.windows.sliding_window.filter(|_| self.windows.use_sliding_window);
        let layer = LayerForm { window, ..LayerForm::default() };
        BlockForm {
            layers: vec![layer; self.decoder.num_hidden_layers],
            bias: AttentionBias::all(self.attention_bias),
            head_norms: QueryKeyNorm::Head,
            mixture: Some(&self.mixture),
            ..BlockForm::default()
        }
    }

    fn windows(&self) -> Option<&LayerWindows> {
        Some(&self.windows)
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.windows.check(self.decoder.num_hidden_layers)
    }
}
