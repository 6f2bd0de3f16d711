//! The Qwen3 family: Llama with a normalisation of each head's queries and keys. Keys have the names and the meaning of
//! Hugging Face's `Qwen3ForCausalLM`. Sliding windows are not supported.

use std::ops::Range;

use burn::tensor::Device;
use pipewright_schedule::ModelDesc;
use serde::{Deserialize, Serialize};

use crate::decoder::{AttentionBias, BlockForm, DecoderConfig, DecoderStage};
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::parameter::ParameterSource;

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

impl Qwen3Config {
    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            normalises_heads: true,
            ..BlockForm::default()
        }
    }
}

impl ModelFamily for Qwen3Config {
    const MODEL_TYPE: &'static str = "qwen3";
    const ARCHITECTURE: &'static str = "Qwen3ForCausalLM";
    const KEYS: &'static [&'static str] = &["attention_bias"];
    type Stage = DecoderStage;

    fn of_sizes(sizes: DecoderConfig) -> Self {
        sizes.into()
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab_size
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        self.decoder.describe(&self.form(), sequence)
    }

    fn initializer_range(&self) -> f64 {
        self.decoder.initializer_range
    }

    fn build_stage<S>(
        &self,
        layers: Range<usize>,
        source: &mut S,
        device: &Device,
    ) -> Result<DecoderStage, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>,
    {
        self.decoder.build_stage(&self.form(), layers, source, device)
    }
}
