//! The Qwen2-MoE family: Qwen2 with a mixture of experts and an expert that every token goes through. Keys
//! have the names and the meaning of Hugging Face's `Qwen2MoeForCausalLM`. Without
//! `layer_types`, the window is for every second layer below `max_window_layers`, from the first one on.
//!
//! The balance loss of the router is defined as in [`qwen3_moe`](crate::qwen3_moe).

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::sizes;
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, LayerForm, LayerWindows, MixtureConfig, SharedForm};
use crate::decoder_family::DecoderFamily;

/// A Qwen2-MoE model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen2MoeConfig {
    /// Sizes and constants. `intermediate_size` is for layers without experts.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// Whether queries, keys and values have a bias.
    #[serde(default = "qkv_bias")]
    pub qkv_bias: bool,
    /// Inner width of the expert that every token goes through.
    pub shared_expert_intermediate_size: usize,
    /// The layers with windows.
    #[serde(flatten)]
    pub windows: LayerWindows,
    /// The experts.
    #[serde(flatten)]
    pub mixture: MixtureConfig,
}

fn qkv_bias() -> bool {
    true
}

impl From<DecoderConfig> for Qwen2MoeConfig {
    fn from(decoder: DecoderConfig) -> Self {
        // Published models do not divide the weights of a token's experts by their sum.
        let mixture =
            MixtureConfig { norm_topk_prob: false, ..MixtureConfig::of_width(decoder.intermediate_size) };
        let shared_expert_intermediate_size = decoder.intermediate_size;
        let windows = LayerWindows::default();
        Self { decoder, qkv_bias: true, shared_expert_intermediate_size, windows, mixture }
    }
}

impl DecoderFamily for Qwen2MoeConfig {
    const ROW: Family = family::QWEN2_MOE;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let is_usual = |index: usize| index.is_multiple_of(2) && index < self.windows.max_window_layers();
        let layer =
            |index| LayerForm { window: self.windows.window(index, is_usual(index)), ..LayerForm::default() };
        BlockForm {
            layers: (0..self.decoder.num_hidden_layers).map(layer).collect(),
            bias: AttentionBias { inputs: self.qkv_bias, output: false },
            mixture: Some(&self.mixture),
            shared_expert: Some(SharedForm { inner: self.shared_expert_intermediate_size, has_gate: true }),
            ..BlockForm::default()
        }
    }

    fn windows(&self) -> Option<&LayerWindows> {
        Some(&self.windows)
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.windows.check(self.decoder.num_hidden_layers)?;
        sizes(&[("shared_expert_intermediate_size", self.shared_expert_intermediate_size)])
    }
}
