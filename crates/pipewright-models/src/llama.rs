//! The Llama family. Keys have the names and the meaning of Hugging Face's `LlamaForCausalLM`.

use std::ops::Range;

use burn::tensor::Device;
use pipewright_schedule::ModelDesc;
use serde::{Deserialize, Serialize};

use crate::decoder::{AttentionBias, BlockForm, DecoderConfig, DecoderStage};
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::parameter::ParameterSource;

/// A Llama model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LlamaConfig {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// Whether the four linear layers of the attention have a bias. Published Llama models have none.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether the three linear layers of the feed-forward layer have a bias. Published Llama models have none.
    #[serde(default)]
    pub mlp_bias: bool,
}

impl From<DecoderConfig> for LlamaConfig {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, attention_bias: false, mlp_bias: false }
    }
}

impl LlamaConfig {
    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            mlp_bias: self.mlp_bias,
            ..BlockForm::default()
        }
    }
}

impl ModelFamily for LlamaConfig {
    const MODEL_TYPE: &'static str = "llama";
    const ARCHITECTURE: &'static str = "LlamaForCausalLM";
    const KEYS: &'static [&'static str] = &["attention_bias", "mlp_bias"];
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
