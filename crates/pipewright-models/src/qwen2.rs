//! The Qwen2 family: Llama with biases on queries, keys and values. Keys have the names and the meaning of Hugging
//! Face's `Qwen2ForCausalLM`. Sliding windows are not supported.

use std::ops::Range;

use burn::tensor::Device;
use pipewright_schedule::ModelDesc;
use serde::{Deserialize, Serialize};

use crate::decoder::{AttentionBias, BlockForm, DecoderConfig, DecoderStage};
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::parameter::ParameterSource;

/// A Qwen2 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen2Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The window of `use_sliding_window`. It is kept only so that written files contain it; it does not affect the
    /// results.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// The layers to which `use_sliding_window` does not apply; kept like [`Qwen2Config::sliding_window`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_window_layers: Option<usize>,
}

impl From<DecoderConfig> for Qwen2Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, sliding_window: None, max_window_layers: None }
    }
}

fn form() -> BlockForm<'static> {
    BlockForm { bias: AttentionBias { inputs: true, output: false }, ..BlockForm::default() }
}

impl ModelFamily for Qwen2Config {
    const MODEL_TYPE: &'static str = "qwen2";
    const ARCHITECTURE: &'static str = "Qwen2ForCausalLM";
    const KEYS: &'static [&'static str] = &[];
    type Stage = DecoderStage;

    fn of_sizes(sizes: DecoderConfig) -> Self {
        sizes.into()
    }

    fn vocab_size(&self) -> usize {
        self.decoder.vocab_size
    }

    fn describe(&self, sequence: usize) -> ModelDesc {
        self.decoder.describe(&form(), sequence)
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
        self.decoder.build_stage(&form(), layers, source, device)
    }
}
