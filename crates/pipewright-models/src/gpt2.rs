//! The GPT-2 family (Radford et al., 2019): trained vectors of positions, layer normalisations, biases,
//! joined projections of queries, keys and values, and feed-forward layers without a gate. Keys have the
//! names and the meaning of Hugging Face's `GPT2LMHeadModel`. In files, matrices of blocks are `[inputs,
//! outputs]`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::{require, rows};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::attention::AttentionBias;
use crate::decoder::{Activation, BlockForm, DecoderConfig, Factors, LayerForm};
use crate::decoder_family::DecoderFamily;
use crate::path_names::PathNames;

/// The names of parts of paths in files.
const NAMES: PathNames = PathNames::new(&[
    ("model", "transformer"),
    ("embed_tokens", "wte"),
    ("embed_positions", "wpe"),
    ("layers", "h"),
    ("input_layernorm", "ln_1"),
    ("self_attn", "attn"),
    ("qkv_proj", "c_attn"),
    ("o_proj", "c_proj"),
    ("post_attention_layernorm", "ln_2"),
    ("up_proj", "c_fc"),
    ("down_proj", "c_proj"),
    ("norm", "ln_f"),
]);

/// A GPT-2 model.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpt2Config {
    /// Sizes and constants. Files have other names for them, such as `n_embd` for `hidden_size`. The number
    /// of positions with a vector is `max_position_embeddings`, `n_positions` in files.
    pub decoder: DecoderConfig,
    /// Whether the scores are divided by the root of a head's width.
    pub scale_attn_weights: bool,
    /// Whether the scores of a block are divided by its number, counted from 1.
    pub scale_attn_by_inverse_layer_idx: bool,
}

/// The keys that other families do not have.
#[derive(Deserialize)]
struct OwnKeys {
    #[serde(default = "yes")]
    scale_attn_weights: bool,
    #[serde(default)]
    scale_attn_by_inverse_layer_idx: bool,
}

fn yes() -> bool {
    true
}

impl<'de> Deserialize<'de> for Gpt2Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = Map::deserialize(deserializer)?;
        // Without `n_inner`, feed-forward layers are four times as wide as the hidden states.
        if let (None, Some(width)) = (keys.get("intermediate_size"), keys.get("hidden_size")) {
            let inner = width.as_u64().and_then(|width| width.checked_mul(4));
            keys.insert("intermediate_size".to_owned(), inner.map_or_else(|| width.clone(), Value::from));
        }
        let keys = Value::Object(keys);
        let own = OwnKeys::deserialize(&keys).map_err(D::Error::custom)?;
        let decoder = <DecoderConfig as Deserialize>::deserialize(&keys).map_err(D::Error::custom)?;
        Ok(Self {
            scale_attn_weights: own.scale_attn_weights,
            scale_attn_by_inverse_layer_idx: own.scale_attn_by_inverse_layer_idx,
            ..Self::from(decoder)
        })
    }
}

impl Serialize for Gpt2Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut keys = json!(self.decoder);
        if let Some(keys) = keys.as_object_mut() {
            keys.retain(|key, _| !["rope_theta", "rope_parameters"].contains(&key.as_str()));
            if self.decoder.num_key_value_heads == self.decoder.num_attention_heads {
                keys.remove("num_key_value_heads");
            }
            keys.insert("scale_attn_weights".to_owned(), self.scale_attn_weights.into());
            // transformers drops elements if a file does not say otherwise.
            for dropout in ["resid_pdrop", "embd_pdrop", "attn_pdrop"] {
                keys.insert(dropout.to_owned(), 0.0.into());
            }
            let by_layer = self.scale_attn_by_inverse_layer_idx.into();
            keys.insert("scale_attn_by_inverse_layer_idx".to_owned(), by_layer);
        }
        keys.serialize(serializer)
    }
}

/// Returns the number of positions with a vector.
fn positions(decoder: &DecoderConfig) -> usize {
    decoder.max_position_embeddings.unwrap_or_else(|| family::GPT2.usual("n_positions"))
}

impl From<DecoderConfig> for Gpt2Config {
    fn from(decoder: DecoderConfig) -> Self {
        let positions = positions(&decoder);
        Self {
            decoder: DecoderConfig { max_position_embeddings: Some(positions), ..decoder },
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
        }
    }
}

impl DecoderFamily for Gpt2Config {
    const ROW: Family = family::GPT2;
    const ACTIVATION: (&'static str, &'static str) = ("activation_function", "gelu_new");

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let number = |index: usize| (index + 1) as f64;
        let layer = |index| LayerForm {
            has_positions: false,
            score_divisor: if self.scale_attn_by_inverse_layer_idx { number(index) } else { 1.0 },
            ..LayerForm::default()
        };
        BlockForm {
            bias: AttentionBias::all(true),
            mlp_bias: true,
            layer_norms: true,
            activation: Activation::GeluTanh,
            has_no_gate: true,
            joins_projections: true,
            inputs_first: true,
            position_table: Some(positions(&self.decoder)),
            layers: (0..self.decoder.num_hidden_layers).map(layer).collect(),
            factors: Factors { scores: (!self.scale_attn_weights).then_some(1.0), ..Factors::default() },
            names: NAMES,
            ..BlockForm::default()
        }
    }

    /// The matrices that add to the hidden states begin smaller, because there are two of them in each block.
    fn deviation_of(&self, parameter: &str) -> f64 {
        let DecoderConfig { initializer_range, num_hidden_layers, .. } = self.decoder;
        let adds = parameter.ends_with(".c_proj.weight");
        if adds { initializer_range / (2.0 * num_hidden_layers as f64).sqrt() } else { initializer_range }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        let decoder = &self.decoder;
        rows(&[("n_positions", positions(decoder))])?;
        let (heads, key_heads) = (decoder.num_attention_heads, decoder.num_key_value_heads);
        require(key_heads == heads, "num_key_value_heads", key_heads, "the same as `n_head`")?;
        let (width, expected) = (decoder.head_dim(), decoder.hidden_size / heads.max(1));
        require(width == expected, "head_dim", width, "`n_embd` divided by `n_head`")?;
        match &decoder.rope_scaling {
            None => Ok(()),
            Some(scaling) => {
                Err(ShapeError::not_supported("rope_scaling.rope_type", scaling.name(), "default"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_files_cannot_hold_name_their_key() {
        let sizes = DecoderConfig::new(32, 4);
        let key = |sizes: DecoderConfig| Some(Gpt2Config::from(sizes).check_own().err()?.keys()[0].clone());
        assert_eq!(key(sizes.clone()), None);
        let fewer = DecoderConfig { num_key_value_heads: 2, ..sizes.clone() };
        assert_eq!(key(fewer).as_deref(), Some("num_key_value_heads"));
        assert_eq!(key(DecoderConfig { head_dim: Some(8), ..sizes }).as_deref(), Some("head_dim"));
    }

    #[test]
    fn without_a_length_there_are_1024_positions() {
        let decoder = DecoderConfig::new(32, 4);
        let config = Gpt2Config { decoder: decoder.clone(), ..Gpt2Config::from(decoder) };
        assert_eq!(config.form().position_table, Some(1024));
    }
}
