//! The Qwen2 family: Llama with biases on queries, keys and values. Keys have the names and the meaning of
//! Hugging Face's `Qwen2ForCausalLM`. Sliding windows are not supported.

use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::config_key::{Harmless, KeyTable, Refused};
use crate::decoder::{BlockForm, COMPUTED_KEYS, DecoderConfig, REFUSED_KEYS, WINDOW_KEYS};
use crate::decoder_family::DecoderFamily;
use crate::family::AbsentKey;

/// A Qwen2 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen2Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The window of `use_sliding_window`. It is kept only so that written files contain it; it does not
    /// affect the results.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// The layers to which `use_sliding_window` does not apply; kept like [`Qwen2Config::sliding_window`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_window_layers: Option<usize>,
}

impl From<DecoderConfig> for Qwen2Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, sliding_window: None, max_window_layers: None }
    }
}

impl DecoderFamily for Qwen2Config {
    const NAME: &'static str = "qwen2";
    const CLASS: &'static str = "Qwen2ForCausalLM";
    const KEY_TABLE: &'static KeyTable = &KeyTable {
        computes: &[COMPUTED_KEYS],
        ignored: &[WINDOW_KEYS, &["attention_bias"]],
        refused: &[REFUSED_KEYS, &[Refused { key: "mlp_bias", harmless: Harmless::False }]],
    };
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] =
        &[("num_key_value_heads", AbsentKey::Count(32))];

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm { bias: AttentionBias { inputs: true, output: false }, ..BlockForm::default() }
    }
}
