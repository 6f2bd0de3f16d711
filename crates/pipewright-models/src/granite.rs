//! The Granite family: Llama with factors of the embeddings, the residual branches, the scores and the
//! logits. Keys have the names and the meaning of Hugging Face's `GraniteForCausalLM`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::above_zero;
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, Factors};
use crate::decoder_family::DecoderFamily;

/// A Granite model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GraniteConfig {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The factor of the embeddings.
    #[serde(default = "one")]
    pub embedding_multiplier: f64,
    /// The factor of the output of an attention or a feed-forward layer, before it is added to its input.
    #[serde(default = "one")]
    pub residual_multiplier: f64,
    /// The factor of the scores, in place of `1 / sqrt(head_dim)`.
    #[serde(default = "one")]
    pub attention_multiplier: f64,
    /// The divisor of the logits.
    #[serde(default = "one")]
    pub logits_scaling: f64,
    /// Whether the four linear layers of the attention have a bias. Published models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether the three linear layers of the feed-forward layer have a bias. Published models have no such
    /// bias.
    #[serde(default)]
    pub mlp_bias: bool,
}

fn one() -> f64 {
    1.0
}

/// A model of these sizes without further factors, which computes what a Llama computes.
impl From<DecoderConfig> for GraniteConfig {
    fn from(decoder: DecoderConfig) -> Self {
        let attention_multiplier = 1.0 / (decoder.head_dim().max(1) as f64).sqrt();
        Self {
            decoder,
            embedding_multiplier: 1.0,
            residual_multiplier: 1.0,
            attention_multiplier,
            logits_scaling: 1.0,
            attention_bias: false,
            mlp_bias: false,
        }
    }
}

impl DecoderFamily for GraniteConfig {
    const ROW: Family = family::GRANITE;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            mlp_bias: self.mlp_bias,
            factors: Factors {
                embedding: self.embedding_multiplier,
                residual: self.residual_multiplier,
                scores: Some(self.attention_multiplier),
                logits: 1.0 / self.logits_scaling,
            },
            ..BlockForm::default()
        }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        above_zero(&[
            ("embedding_multiplier", self.embedding_multiplier),
            ("residual_multiplier", self.residual_multiplier),
            ("attention_multiplier", self.attention_multiplier),
            ("logits_scaling", self.logits_scaling),
        ])
    }
}
