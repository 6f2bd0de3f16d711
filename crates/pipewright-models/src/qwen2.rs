//! The Qwen2 family: Llama with biases on queries, keys and values, and windows in some layers. Keys have the
//! names and the meaning of Hugging Face's `Qwen2ForCausalLM`.

use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::config_key::{Harmless, KeyTable, Refused};
use crate::decoder::{
    BlockForm, COMPUTED_KEYS, DecoderConfig, LAYER_WINDOW_KEYS, LayerWindows, REFUSED_BESIDE_WINDOWS,
};
use crate::decoder_family::DecoderFamily;
use crate::error::ConfigError;
use crate::family::AbsentKey;

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
    const NAME: &'static str = "qwen2";
    const CLASS: &'static str = "Qwen2ForCausalLM";
    const KEY_TABLE: &'static KeyTable = &KeyTable {
        computes: &[COMPUTED_KEYS, LAYER_WINDOW_KEYS],
        ignored: &[&["attention_bias"]],
        refused: &[REFUSED_BESIDE_WINDOWS, &[Refused { key: "mlp_bias", harmless: Harmless::False }]],
    };
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] =
        &[("num_key_value_heads", AbsentKey::Count(32)), ("sliding_window", AbsentKey::Count(4096))];

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias { inputs: true, output: false },
            layers: self.windows.layers(self.decoder.num_hidden_layers),
            ..BlockForm::default()
        }
    }

    fn windows(&self) -> Option<&LayerWindows> {
        Some(&self.windows)
    }

    fn check_own(&self) -> Result<(), ConfigError> {
        self.windows.check(self.decoder.num_hidden_layers)
    }
}
