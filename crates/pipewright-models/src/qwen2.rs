//! The Qwen2 family: Llama with biases on queries, keys and values, and windows in some layers. Keys have the
//! names and the meaning of Hugging Face's `Qwen2ForCausalLM`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, LayerWindows, with_windows};
use crate::decoder_family::DecoderFamily;

/// A Qwen2 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen2Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The layers with windows.
    #[serde(flatten)]
    pub windows: LayerWindows,
}

impl From<DecoderConfig> for Qwen2Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, windows: LayerWindows::default() }
    }
}

impl DecoderFamily for Qwen2Config {
    const ROW: Family = family::QWEN2;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias { inputs: true, output: false },
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
