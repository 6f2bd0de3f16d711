//! The OLMo 3 family: OLMo 2 in which most layers have a window, and positions that are not scaled. Keys have the names
//! and the meaning of Hugging Face's `Olmo3ForCausalLM`.
//!
//! Files of version 5 of transformers have a table of positions for each kind of layers. Without these tables, all
//! layers have the base `rope_theta`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::{has_window, require_listed, require_window};
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::above_zero;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, LayerForm, LayerType, NormPlaces, QueryKeyNorm};
use crate::decoder_family::DecoderFamily;
use crate::layer_tables::{LOCAL_THETA, join_tables, with_tables};

/// Every how many layers one sees all tokens, without a list of their kinds.
const WHOLE_EVERY: usize = 4;

/// An OLMo 3 model.
#[derive(Debug, Clone, PartialEq)]
pub struct Olmo3Config {
    /// Sizes and constants. The positions belong to the layers that see all tokens.
    pub decoder: DecoderConfig,
    /// The keys that Llama does not have.
    pub own: Olmo3Keys,
}

/// The keys of OLMo 3 that Llama does not have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Olmo3Keys {
    /// How many tokens back a token sees in layers with a window, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// The kind of each layer. Without a list, every fourth layer sees all tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<LayerType>>,
    /// The base of the rotary frequencies in layers with a window. Files have it in a table of positions.
    #[serde(skip_serializing)]
    pub rope_local_base_freq: f64,
    /// Whether the four linear layers of the attention have a bias. Published models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
}

impl Serialize for Olmo3Config {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut keys = with_tables(&self.decoder, self.own.rope_local_base_freq);
        if let (Some(keys), Value::Object(own)) = (keys.as_object_mut(), json!(self.own)) {
            keys.extend(own);
        }
        keys.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Olmo3Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = Map::deserialize(deserializer)?;
        join_tables(&mut keys).map_err(D::Error::custom)?;
        let mut keys = Value::Object(keys);
        let decoder = <DecoderConfig as Deserialize>::deserialize(&keys).map_err(D::Error::custom)?;
        if keys.get(LOCAL_THETA).is_none() {
            keys[LOCAL_THETA] = decoder.rope_theta.into();
        }
        Ok(Self { decoder, own: Olmo3Keys::deserialize(&keys).map_err(D::Error::custom)? })
    }
}

impl From<DecoderConfig> for Olmo3Config {
    fn from(decoder: DecoderConfig) -> Self {
        let own = Olmo3Keys {
            sliding_window: Some(4096),
            layer_types: None,
            rope_local_base_freq: decoder.rope_theta,
            attention_bias: false,
        };
        Self { decoder, own }
    }
}

impl DecoderFamily for Olmo3Config {
    const ROW: Family = family::OLMO3;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let (own, types) = (&self.own, self.own.layer_types.as_deref());
        let local = LayerForm {
            window: own.sliding_window,
            theta: Some(own.rope_local_base_freq),
            ..LayerForm::default()
        };
        let is_local = |index: usize| has_window(types, index, !(index + 1).is_multiple_of(WHOLE_EVERY));
        let layer = |index| if is_local(index) { local } else { LayerForm::default() };
        BlockForm {
            bias: AttentionBias::all(own.attention_bias),
            head_norms: QueryKeyNorm::All,
            norms: NormPlaces::After,
            layers: (0..self.decoder.num_hidden_layers).map(layer).collect(),
            ..BlockForm::default()
        }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        require_window(self.own.sliding_window)?;
        above_zero(&[(LOCAL_THETA, self.own.rope_local_base_freq)])?;
        require_listed(self.own.layer_types.as_deref(), self.decoder.num_hidden_layers)
    }
}
