//! The Qwen3 family: Llama with a normalisation of each head's queries and keys, and windows in some layers.
//! Keys have the names and the meaning of Hugging Face's `Qwen3ForCausalLM`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, LayerWindows, QueryKeyNorm, with_windows};
use crate::decoder_family::DecoderFamily;

/// A Qwen3 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen3Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// Whether the four linear layers of the attention have a bias. Published Qwen3 models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// The layers with windows.
    #[serde(flatten)]
    pub windows: LayerWindows,
}

impl From<DecoderConfig> for Qwen3Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, attention_bias: false, windows: LayerWindows::default() }
    }
}

impl DecoderFamily for Qwen3Config {
    const ROW: Family = family::QWEN3;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            head_norms: QueryKeyNorm::Head,
            layers: with_windows(self.windows.of_layers(self.decoder.num_hidden_layers)),
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
