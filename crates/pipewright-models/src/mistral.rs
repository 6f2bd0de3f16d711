//! The Mistral family: Llama whose tokens see only a window of earlier tokens. Keys have the names and the
//! meaning of Hugging Face's `MistralForCausalLM`.

use serde::{Deserialize, Serialize};

use crate::config_key::KeyTable;
use crate::decoder::{BlockForm, COMPUTED_KEYS, DecoderConfig, LayerForm, REFUSED_KEYS, require_window};
use crate::decoder_family::DecoderFamily;
use crate::error::ConfigError;
use crate::family::AbsentKey;

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
    const NAME: &'static str = "mistral";
    const CLASS: &'static str = "MistralForCausalLM";
    const KEY_TABLE: &'static KeyTable =
        &KeyTable { computes: &[COMPUTED_KEYS, &["sliding_window"]], ignored: &[], refused: &[REFUSED_KEYS] };
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] =
        &[("num_key_value_heads", AbsentKey::Count(8)), ("sliding_window", AbsentKey::Count(4096))];

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let layer = LayerForm { window: self.sliding_window, ..LayerForm::default() };
        BlockForm { layers: vec![layer; self.decoder.num_hidden_layers], ..BlockForm::default() }
    }

    fn check_own(&self) -> Result<(), ConfigError> {
        require_window(self.sliding_window)
    }
}
