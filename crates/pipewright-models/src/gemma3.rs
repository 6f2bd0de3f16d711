//! The Gemma 3 family, the models of text: Gemma 2 with a normalisation of each head's queries and keys
//! instead of bounded scores. Most layers have a window and rotary positions of a base of their own. Keys
//! have the names and the meaning of Hugging Face's `Gemma3ForCausalLM`.
//!
//! `config.json` of version 5 of transformers has a table of positions for each kind of layer, and of version
//! 4 `rope_theta` and `rope_scaling` for the layers that see all tokens, and `rope_local_base_freq` for the
//! others.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::{has_window, require_listed, require_window};
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::{above_zero, require, sizes};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, LayerForm, LayerType, QueryKeyNorm};
use crate::decoder_family::DecoderFamily;
use crate::gemma2::gemma_form;
use crate::layer_tables::{join_tables, with_tables};

/// A Gemma 3 model of text.
#[derive(Debug, Clone, PartialEq)]
pub struct Gemma3Config {
    /// Sizes and constants. The positions belong to the layers that see all tokens.
    pub decoder: DecoderConfig,
    /// The keys that Llama does not have.
    pub own: Gemma3Keys,
}

/// The keys of Gemma 3 that Llama does not have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gemma3Keys {
    /// The scores are divided by the root of this number.
    pub query_pre_attn_scalar: usize,
    /// How many tokens back a token sees in layers with a window, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// The kind of each layer: `sliding_attention` has the window and the positions of
    /// `rope_local_base_freq`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<LayerType>>,
    /// Without a list, the layers whose number, counted from 1, is a multiple of this see all tokens.
    #[serde(default = "pattern")]
    pub sliding_window_pattern: usize,
    /// The base of the rotary frequencies in layers with a window.
    #[serde(default = "local_theta")]
    pub rope_local_base_freq: f64,
    /// The bound of the logits; `None` for no bound, as in published models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_logit_softcapping: Option<f64>,
    /// Whether the four linear layers of the attention have a bias. Published models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
}

fn pattern() -> usize {
    6
}

fn local_theta() -> f64 {
    10_000.0
}

impl Serialize for Gemma3Config {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut keys = with_tables(&self.decoder, self.own.rope_local_base_freq);
        if let (Some(keys), Value::Object(own)) = (keys.as_object_mut(), json!(self.own)) {
            keys.extend(own);
        }
        keys.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Gemma3Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = Map::deserialize(deserializer)?;
        join_tables(&mut keys).map_err(D::Error::custom)?;
        let keys = Value::Object(keys);
        let decoder = <DecoderConfig as Deserialize>::deserialize(&keys).map_err(D::Error::custom)?;
        Ok(Self { decoder, own: Gemma3Keys::deserialize(&keys).map_err(D::Error::custom)? })
    }
}

impl From<DecoderConfig> for Gemma3Config {
    fn from(decoder: DecoderConfig) -> Self {
        let own = Gemma3Keys {
            query_pre_attn_scalar: decoder.head_dim(),
            sliding_window: Some(512),
            layer_types: None,
            sliding_window_pattern: pattern(),
            rope_local_base_freq: local_theta(),
            final_logit_softcapping: None,
            attention_bias: false,
        };
        Self { decoder, own }
    }
}

impl DecoderFamily for Gemma3Config {
    const ROW: Family = family::GEMMA3;
    const ACTIVATION: (&'static str, &'static str) = ("hidden_activation", "gelu_pytorch_tanh");

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let own = &self.own;
        let types = own.layer_types.as_deref();
        let is_usual = |index: usize| !(index + 1).is_multiple_of(own.sliding_window_pattern);
        let is_local = |index| has_window(types, index, is_usual(index));
        let local = LayerForm {
            window: own.sliding_window,
            theta: Some(own.rope_local_base_freq),
            ..LayerForm::default()
        };
        let layer = |index| if is_local(index) { local } else { LayerForm::default() };
        BlockForm {
            bias: AttentionBias::all(own.attention_bias),
            head_norms: QueryKeyNorm::Head,
            layers: (0..self.decoder.num_hidden_layers).map(layer).collect(),
            logit_cap: own.final_logit_softcapping,
            ..gemma_form(&self.decoder, own.query_pre_attn_scalar)
        }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        let own = &self.own;
        require_window(own.sliding_window)?;
        let pattern = own.sliding_window_pattern;
        require(pattern > 0, "sliding_window_pattern", pattern, "at least 1")?;
        sizes(&[("query_pre_attn_scalar", own.query_pre_attn_scalar)])?;
        above_zero(&[("rope_local_base_freq", own.rope_local_base_freq)])?;
        own.final_logit_softcapping.map_or(Ok(()), |cap| above_zero(&[("final_logit_softcapping", cap)]))?;
        require_listed(own.layer_types.as_deref(), self.decoder.num_hidden_layers)
    }
}
