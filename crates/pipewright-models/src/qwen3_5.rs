//! The Qwen3.5 family without experts, the models of text (Qwen team, 2026): dense Qwen3-Next, whose linear attention
//! has a projection for each of its inputs. Keys have the names and the meaning of Hugging Face's `Qwen3_5ForCausalLM`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::decoder::{BlockForm, DecoderConfig};
use crate::decoder_family::DecoderFamily;
use crate::qwen3_next::LinearAttention;

/// A Qwen3.5 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen35Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The linear attention.
    #[serde(flatten)]
    pub linear: LinearAttention,
}

impl From<DecoderConfig> for Qwen35Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { linear: LinearAttention::of_sizes(&decoder), decoder }
    }
}

impl DecoderFamily for Qwen35Config {
    const ROW: Family = family::QWEN3_5;
    const ROTATES_PARTS: bool = true;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        self.linear.form(self.decoder.num_hidden_layers, false)
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.linear.check(self.decoder.num_hidden_layers)
    }
}
