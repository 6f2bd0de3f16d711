//! The SmolLM 3 family: Llama with some layers whose queries and keys are not rotated. Keys have the names
//! and the meaning of Hugging Face's `SmolLM3ForCausalLM`. Without `layer_types`, these layers have the
//! window.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::require;
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, LayerForm, LayerWindows};
use crate::decoder_family::DecoderFamily;

/// A SmolLM 3 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SmolLm3Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// For each layer, 1 if its queries and keys are rotated, and 0 if they are not. It may be longer than
    /// the list of layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_rope_layers: Option<Vec<u8>>,
    /// Without a list, the layers whose number, counted from 1, is a multiple of this are not rotated.
    #[serde(default = "interval")]
    pub no_rope_layer_interval: usize,
    /// The layers with windows.
    #[serde(flatten)]
    pub windows: LayerWindows,
    /// Whether the four linear layers of the attention have a bias. Published models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether the three linear layers of the feed-forward layer have a bias. Published models have no such
    /// bias.
    #[serde(default)]
    pub mlp_bias: bool,
}

fn interval() -> usize {
    4
}

impl From<DecoderConfig> for SmolLm3Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self {
            decoder,
            no_rope_layers: None,
            no_rope_layer_interval: interval(),
            windows: LayerWindows::default(),
            attention_bias: false,
            mlp_bias: false,
        }
    }
}

impl DecoderFamily for SmolLm3Config {
    const ROW: Family = family::SMOLLM3;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let is_rotated = |index: usize| match &self.no_rope_layers {
            Some(layers) => layers.get(index) == Some(&1),
            None => !(index + 1).is_multiple_of(self.no_rope_layer_interval),
        };
        let layer = |index| LayerForm {
            has_positions: is_rotated(index),
            window: self.windows.window(index, !is_rotated(index)),
            ..LayerForm::default()
        };
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            mlp_bias: self.mlp_bias,
            layers: (0..self.decoder.num_hidden_layers).map(layer).collect(),
            ..BlockForm::default()
        }
    }

    fn windows(&self) -> Option<&LayerWindows> {
        Some(&self.windows)
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.windows.check(self.decoder.num_hidden_layers)?;
        let interval = self.no_rope_layer_interval;
        require(interval > 0, "no_rope_layer_interval", interval, "at least 1")?;
        let Some(layers) = &self.no_rope_layers else { return Ok(()) };
        let is_complete =
            layers.len() >= self.decoder.num_hidden_layers && layers.iter().all(|&flag| flag <= 1);
        require(is_complete, "no_rope_layers", format!("{layers:?}"), "a list with 0 or 1 for each layer")
    }
}
