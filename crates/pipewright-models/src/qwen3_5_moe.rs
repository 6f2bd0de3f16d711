//! The Qwen3.5 family with experts, the models of text: [`qwen3_next`](crate::qwen3_next) with the linear attention of
//! [`qwen3_5`](crate::qwen3_5), and with experts in every layer. Keys have the names and the meaning of Hugging Face's
//! `Qwen3_5MoeForCausalLM`. As there, the weights of a token's experts are divided by their sum.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::decoder::{BlockForm, DecoderConfig};
use crate::decoder_family::DecoderFamily;
use crate::qwen3_next::Qwen3NextConfig;

/// A Qwen3.5 model with experts. `intermediate_size` has no effect.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Qwen35MoeConfig(pub Qwen3NextConfig);

impl<'de> Deserialize<'de> for Qwen35MoeConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = Map::deserialize(deserializer)?;
        // No layer is so wide, and files need not say how wide it would be.
        if let Some(width) = keys.get("moe_intermediate_size").cloned() {
            keys.entry("intermediate_size").or_insert(width);
        }
        let mut config = Qwen3NextConfig::deserialize(Value::Object(keys)).map_err(D::Error::custom)?;
        config.mixture.norm_topk_prob = true;
        Ok(Self(config))
    }
}

impl From<DecoderConfig> for Qwen35MoeConfig {
    fn from(decoder: DecoderConfig) -> Self {
        Self(decoder.into())
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
