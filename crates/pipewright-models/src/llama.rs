//! The Llama family. Keys have the names and the meaning of Hugging Face's `LlamaForCausalLM`.

use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig};
use crate::decoder_family::DecoderFamily;

/// A Llama model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LlamaConfig {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// Whether the four linear layers of the attention have a bias. Published Llama models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether the three linear layers of the feed-forward layer have a bias. Published Llama models have no
    /// such bias.
    #[serde(default)]
    pub mlp_bias: bool,
}

impl From<DecoderConfig> for LlamaConfig {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, attention_bias: false, mlp_bias: false }
    }
}

impl DecoderFamily for LlamaConfig {
    const ROW: Family = family::LLAMA;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            mlp_bias: self.mlp_bias,
            ..BlockForm::default()
        }
    }
}
