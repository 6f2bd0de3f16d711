//! The OLMo 2 family: Llama with norms after both parts of a block instead of before them, and with norms of
//! all queries and of all keys. Keys have the names and the meaning of Hugging Face's `Olmo2ForCausalLM`.
//!
//! A norm of all queries is a mean over all heads: ranks that compute an attention together add their parts.

use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, NormPlaces, QueryKeyNorm};
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
    const ROW: Family = family::OLMO2;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            head_norms: QueryKeyNorm::All,
            norms: NormPlaces::After,
            ..BlockForm::default()
        }
    }
}
