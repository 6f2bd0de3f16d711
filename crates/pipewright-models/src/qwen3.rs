//! The Qwen3 family: Llama with a normalisation of each head's queries and keys. Keys have the names and the meaning of
//! Hugging Face's `Qwen3ForCausalLM`. Sliding windows are not supported.

use serde::{Deserialize, Serialize};

use crate::decoder::{AttentionBias, BlockForm, DecoderConfig};
use crate::decoder_family::DecoderFamily;

/// A Qwen3 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen3Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// Whether the four linear layers of the attention have a bias. Published Qwen3 models have none.
    #[serde(default)]
    pub attention_bias: bool,
}

impl From<DecoderConfig> for Qwen3Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, attention_bias: false }
    }
}

impl DecoderFamily for Qwen3Config {
    const NAME: &'static str = "qwen3";
    const CLASS: &'static str = "Qwen3ForCausalLM";
    const OWN_KEYS: &'static [&'static str] = &["attention_bias"];

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            normalises_heads: true,
            ..BlockForm::default()
        }
    }
}
