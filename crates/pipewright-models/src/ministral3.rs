//! The Ministral 3 family: Mistral whose queries grow with their positions beyond the original length of the scaled
//! positions. Keys have the names and the meaning of Hugging Face's `Ministral3ForCausalLM`.
//!
//! The factor of a query at position `p` is `1 + beta ln(1 + floor(p / original length))`, as in Llama 4.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::require_window;
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::not_below_zero;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

use crate::decoder::{BlockForm, DecoderConfig, QueryGrowth, RopeScaling, with_windows};
use crate::decoder_family::DecoderFamily;

/// The key of the growth in a table of positions.
const BETA: &str = "llama_4_scaling_beta";

/// A Ministral 3 model.
#[derive(Debug, Clone, PartialEq)]
pub struct Ministral3Config {
    /// Sizes and constants.
    pub decoder: DecoderConfig,
    /// How many tokens back a token sees, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// The growth of queries with positions; 0 for constant ones.
    pub llama_4_scaling_beta: f64,
}

impl Serialize for Ministral3Config {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut keys = json!(self.decoder);
        keys["sliding_window"] = self.sliding_window.into();
        keys["rope_parameters"][BETA] = self.llama_4_scaling_beta.into();
        keys.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Ministral3Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (mut keys, mut beta) = (Map::deserialize(deserializer)?, None);
        for name in ["rope_scaling", "rope_parameters"] {
            if let Some(table) = keys.get_mut(name).and_then(Value::as_object_mut) {
                beta = table.remove(BETA).or(beta);
            }
        }
        let window = keys.remove("sliding_window").unwrap_or_default();
        let decoder =
            <DecoderConfig as Deserialize>::deserialize(Value::Object(keys)).map_err(D::Error::custom)?;
        let sliding_window = Deserialize::deserialize(window).map_err(D::Error::custom)?;
        let not_a_number =
            || D::Error::custom(ShapeError::missing(&format!("rope_parameters.{BETA}"), "a number"));
        let beta = beta.map_or(Some(0.0), |beta| beta.as_f64()).ok_or_else(not_a_number)?;
        Ok(Self { decoder, sliding_window, llama_4_scaling_beta: beta })
    }
}

impl From<DecoderConfig> for Ministral3Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, sliding_window: None, llama_4_scaling_beta: 0.0 }
    }
}

impl DecoderFamily for Ministral3Config {
    const ROW: Family = family::MINISTRAL3;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let growth = match &self.decoder.rope_scaling {
            Some(RopeScaling::Yarn(yarn)) => Some(QueryGrowth {
                beta: self.llama_4_scaling_beta,
                length: yarn.original_max_position_embeddings,
            }),
            _ => None,
        };
        BlockForm {
            layers: with_windows((0..self.decoder.num_hidden_layers).map(|_| self.sliding_window)),
            query_growth: growth.filter(|growth| growth.beta > 0.0),
            ..BlockForm::default()
        }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        require_window(self.sliding_window)?;
        let beta = self.llama_4_scaling_beta;
        not_below_zero(&[(BETA, beta)])?;
        let other = self.decoder.rope_scaling.as_ref().map_or("default", RopeScaling::name);
        if beta == 0.0 || other == "yarn" {
            return Ok(());
        }
        // The other types have no original length, or published models do not have them.
        Err(ShapeError::not_supported("rope_parameters.rope_type", other, &format!("yarn with `{BETA}`")))
    }
}
