//! The Mistral family: Llama whose tokens see only a window of earlier tokens. Keys have the names and the
//! meaning of Hugging Face's `MistralForCausalLM`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::require_window;
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::decoder::{BlockForm, DecoderConfig, LayerForm};
use crate::decoder_family::DecoderFamily;

/// A Mistral model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MistralConfig {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// How many tokens back a token sees, itself included; `None` for all.
    pub sliding_window: Option<usize>,
}

impl From<DecoderConfig> for MistralConfig {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, sliding_window: None }
    }
}

impl DecoderFamily for MistralConfig {
    const ROW: Family = family::MISTRAL;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let layer = LayerForm { window: self.sliding_window, ..LayerForm::default() };
        BlockForm { layers: vec![layer; self.decoder.num_hidden_layers], ..BlockForm::default() }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        require_window(self.sliding_window)
    }
}
