//! The OLMo 2 family: Llama with norms after both parts of a block instead of before them, and with norms of
//! all queries and of all keys. Keys have the names and the meaning of Hugging Face's `Olmo2ForCausalLM`.
//!
//! A norm of all queries is a mean over all heads: ranks that compute an attention together add their parts.

use pipewright_shapes::family::{self, AbsentKey};
use pipewright_shapes::key_table::KeyTable;
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, HeadNorms, NormPlaces};
use crate::decoder_family::DecoderFamily;

/// An OLMo 2 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Olmo2Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// Whether the four linear layers of the attention have a bias. Published models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
}

impl From<DecoderConfig> for Olmo2Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, attention_bias: false }
    }
}

impl DecoderFamily for Olmo2Config {
    const NAME: &'static str = "olmo2";
    const CLASS: &'static str = "Olmo2ForCausalLM";
    const KEY_TABLE: &'static KeyTable = family::OLMO2.keys;
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] = family::OLMO2.absent;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            head_norms: HeadNorms::All,
            norms: NormPlaces::After,
            ..BlockForm::default()
        }
    }
}
