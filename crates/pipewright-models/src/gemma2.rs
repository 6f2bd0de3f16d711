//! The Gemma 2 family: norms before and after both parts of a block, bounded scores and logits, scaled
//! embeddings, and windows in some layers. Keys have the names and the meaning of Hugging Face's
//! `Gemma2ForCausalLM`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::{has_window, require_listed, require_window};
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::{above_zero, sizes};
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{Activation, BlockForm, DecoderConfig, Factors, LayerForm, LayerType, NormPlaces};
use crate::decoder_family::DecoderFamily;

/// A Gemma 2 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gemma2Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The scores are divided by the root of this number.
    pub query_pre_attn_scalar: usize,
    /// How many tokens back a token sees in layers with a window, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// The kind of each layer: `sliding_attention` has the window. Without a list, every second layer sees
    /// all tokens, and the first layer has the window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<LayerType>>,
    /// The bound of the scores; `None` for no bound.
    pub attn_logit_softcapping: Option<f64>,
    /// The bound of the logits; `None` for no bound.
    pub final_logit_softcapping: Option<f64>,
    /// Whether the four linear layers of the attention have a bias. Published models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
}

/// Returns the form that blocks of Gemma 2 and 3 have in common.
pub(crate) fn gemma_form(decoder: &DecoderConfig, query_pre_attn_scalar: usize) -> BlockForm<'static> {
    BlockForm {
        factors: Factors {
            embedding: (decoder.hidden_size as f64).sqrt(),
            scores: Some(1.0 / (query_pre_attn_scalar as f64).sqrt()),
            ..Factors::default()
        },
        norms: NormPlaces::Both,
        norms_add_one: true,
        activation: Activation::GeluTanh,
        ..BlockForm::default()
    }
}

impl From<DecoderConfig> for Gemma2Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self {
            query_pre_attn_scalar: decoder.head_dim(),
            decoder,
            sliding_window: Some(4096),
            layer_types: None,
            attn_logit_softcapping: Some(50.0),
            final_logit_softcapping: Some(30.0),
            attention_bias: false,
        }
    }
}

impl DecoderFamily for Gemma2Config {
    const ROW: Family = family::GEMMA2;
    const ACTIVATION: (&'static str, &'static str) = ("hidden_activation", "gelu_pytorch_tanh");

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let types = self.layer_types.as_deref();
        let layer = |index: usize| LayerForm {
            window: self.sliding_window.filter(|_| has_window(types, index, index.is_multiple_of(2))),
            ..LayerForm::default()
        };
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            layers: (0..self.decoder.num_hidden_layers).map(layer).collect(),
            score_cap: self.attn_logit_softcapping,
            logit_cap: self.final_logit_softcapping,
            ..gemma_form(&self.decoder, self.query_pre_attn_scalar)
        }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        require_window(self.sliding_window)?;
        sizes(&[("query_pre_attn_scalar", self.query_pre_attn_scalar)])?;
        let caps = [
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ];
        caps.into_iter().filter_map(|(key, cap)| Some((key, cap?))).try_for_each(|cap| above_zero(&[cap]))?;
        require_listed(self.layer_types.as_deref(), self.decoder.num_hidden_layers)
    }
}
