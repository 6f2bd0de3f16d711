//! The Qwen3.5 family with experts, the models of text: [`qwen3_next`](crate::qwen3_next) with the linear attention of
//! [`qwen3_5`](crate::qwen3_5), and with experts in every layer. Keys have the names and the meaning of Hugging Face's
//! `Qwen3_5MoeForCausalLM`. As there, the weights of a token's experts are divided by their sum.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::decoder::{BlockForm, DecoderConfig};
use crate::decoder_family::DecoderFamily;
use crate::qwen3_next::Qwen3NextConfig;

/// A Qwen3.5 model with experts. `intermediate_size` has no effect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "Qwen3NextConfig", into = "Qwen3NextConfig")]
pub struct Qwen35MoeConfig(pub Qwen3NextConfig);

impl From<Qwen3NextConfig> for Qwen35MoeConfig {
    fn from(mut config: Qwen3NextConfig) -> Self {
        config.mixture.norm_topk_prob = true;
        Self(config)
    }
}

impl From<Qwen35MoeConfig> for Qwen3NextConfig {
    fn from(config: Qwen35MoeConfig) -> Self {
        config.0
    }
}

impl From<DecoderConfig> for Qwen35MoeConfig {
    fn from(decoder: DecoderConfig) -> Self {
        Qwen3NextConfig::from(decoder).into()
    }
}

impl DecoderFamily for Qwen35MoeConfig {
    const ROW: Family = family::QWEN3_5_MOE;
    const ROTATES_PARTS: bool = true;

    fn decoder(&self) -> &DecoderConfig {
        &self.0.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        self.0.form_of(false)
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.0.check_own()
    }
}
