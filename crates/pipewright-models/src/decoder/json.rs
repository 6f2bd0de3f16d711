//! The configuration in the form of Hugging Face's `config.json`, in old and new versions. Absent keys get defaults.
//! Settings that change the results but are not implemented are errors.
//!
//! Some of the rejected keys belong to a single family. They are rejected for all families, because files of other
//! families do not set them.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::config::DecoderConfig;
use super::defaults;
use crate::error::ConfigError;

/// The keys of `config.json` that affect the results, without those that a family adds.
#[derive(Serialize, Deserialize)]
struct RawConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    head_dim: Option<usize>,
    #[serde(default = "defaults::rms_norm_eps")]
    rms_norm_eps: f64,
    /// The base of the rotary frequencies, in files of transformers up to version 4.
    rope_theta: Option<f64>,
    /// The settings of the rotary positions, in files of transformers from version 5.
    rope_parameters: Option<RopeParameters>,
    #[serde(skip_serializing)]
    rope_scaling: Option<Value>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default, skip_serializing)]
    mlp_bias: bool,
    #[serde(default, skip_serializing)]
    use_sliding_window: bool,
    #[serde(skip_serializing)]
    layer_types: Option<Vec<String>>,
    #[serde(default = "defaults::hidden_act")]
    hidden_act: String,
    #[serde(default = "defaults::initializer_range")]
    initializer_range: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_position_embeddings: Option<usize>,
}

#[derive(Serialize, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
}

impl<'de> Deserialize<'de> for DecoderConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        RawConfig::deserialize(deserializer)?.try_into().map_err(D::Error::custom)
    }
}

impl Serialize for DecoderConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        RawConfig::from(self.clone()).serialize(serializer)
    }
}

impl TryFrom<RawConfig> for DecoderConfig {
    type Error = ConfigError;

    fn try_from(raw: RawConfig) -> Result<Self, ConfigError> {
        raw.refuse_unsupported()?;
        let nested_theta = raw.rope_parameters.as_ref().and_then(|rope| rope.rope_theta);
        let config = Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            num_key_value_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim: raw.head_dim,
            rms_norm_eps: raw.rms_norm_eps,
            rope_theta: nested_theta.or(raw.rope_theta).unwrap_or(defaults::ROPE_THETA),
            initializer_range: raw.initializer_range,
            max_position_embeddings: raw.max_position_embeddings,
            tie_word_embeddings: raw.tie_word_embeddings,
        };
        config.validate()?;
        Ok(config)
    }
}

impl RawConfig {
    fn refuse_unsupported(&self) -> Result<(), ConfigError> {
        let refuse = |key, value: &dyn ToString, supported| {
            Err(ConfigError::NotSupported { key, value: value.to_string(), supported })
        };
        let flags = [("mlp_bias", self.mlp_bias), ("use_sliding_window", self.use_sliding_window)];
        if let Some((key, _)) = flags.into_iter().find(|(_, set)| *set) {
            return refuse(key, &true, "false");
        }
        let mut layer_types = self.layer_types.iter().flatten();
        if let Some(other) = layer_types.find(|layer_type| *layer_type != FULL_ATTENTION) {
            return refuse("layer_types", other, FULL_ATTENTION);
        }
        if self.hidden_act != "silu" {
            return refuse("hidden_act", &self.hidden_act, "silu");
        }
        let scaling = self.rope_scaling.as_ref().filter(|scaling| !scaling.is_null());
        let scaling_type = scaling.map(|scaling| scaling.get("rope_type").or_else(|| scaling.get("type")));
        if let Some(scaling_type) = scaling_type
            && scaling_type.and_then(Value::as_str) != Some("default")
        {
            return refuse(
                "rope_scaling",
                &scaling_type.unwrap_or(&Value::Null),
                "null or the type \"default\"",
            );
        }
        match self.rope_parameters.as_ref().and_then(|rope| rope.rope_type.as_ref()) {
            Some(rope_type) if rope_type != "default" => {
                refuse("rope_parameters.rope_type", rope_type, "default")
            }
            _ => Ok(()),
        }
    }
}

impl From<DecoderConfig> for RawConfig {
    fn from(config: DecoderConfig) -> Self {
        let theta = Some(config.rope_theta);
        Self {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: Some(config.num_key_value_heads),
            head_dim: config.head_dim,
            rms_norm_eps: config.rms_norm_eps,
            rope_theta: theta,
            rope_parameters: Some(RopeParameters {
                rope_theta: theta,
                rope_type: Some("default".to_owned()),
            }),
            rope_scaling: None,
            tie_word_embeddings: config.tie_word_embeddings,
            mlp_bias: false,
            use_sliding_window: false,
            layer_types: None,
            hidden_act: defaults::hidden_act(),
            initializer_range: config.initializer_range,
            max_position_embeddings: config.max_position_embeddings,
        }
    }
}

/// The entry of `layer_types` for attention to all earlier tokens.
const FULL_ATTENTION: &str = "full_attention";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(change: Value) -> Result<DecoderConfig, String> {
        let mut json = json!({
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 8,
            "num_attention_heads": 4
        });
        json.as_object_mut().expect("it is one").append(change.clone().as_object_mut().expect("it is one"));
        serde_json::from_value(json).map_err(|error| error.to_string())
    }

    fn check_refused(change: Value, message: &str) {
        assert_eq!(parse(change), Err(message.to_owned()));
    }

    #[test]
    fn absent_keys_get_the_usual_defaults() {
        let expected = DecoderConfig { num_hidden_layers: 8, ..DecoderConfig::new(256, 4) };
        assert_eq!(parse(json!({})), Ok(expected));
    }

    #[test]
    fn theta_is_found_in_both_places() {
        let theta = |change| parse(change).map(|config| config.rope_theta);
        assert_eq!(theta(json!({"rope_theta": 5e5})), Ok(5e5));
        let nested =
            json!({"rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}, "rope_scaling": null});
        assert_eq!(theta(nested), Ok(3e4));
    }

    #[test]
    fn what_is_written_is_read() {
        let config = parse(json!({
            "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
            "tie_word_embeddings": true
        }));
        let config = config.expect("it is valid");
        let written = serde_json::to_value(&config).expect("plain data");
        assert_eq!(serde_json::from_value::<DecoderConfig>(written).ok(), Some(config));
    }

    #[test]
    fn unsupported_settings_name_their_key() {
        let flag = |key| format!("`{key} = true` is not supported: only false is");
        check_refused(json!({"mlp_bias": true}), &flag("mlp_bias"));
        check_refused(json!({"use_sliding_window": true}), &flag("use_sliding_window"));
        check_refused(
            json!({"layer_types": ["full_attention", "sliding_attention"]}),
            "`layer_types = sliding_attention` is not supported: only full_attention is",
        );
        check_refused(json!({"hidden_act": "gelu"}), "`hidden_act = gelu` is not supported: only silu is");
        check_refused(
            json!({"rope_parameters": {"rope_type": "yarn"}}),
            "`rope_parameters.rope_type = yarn` is not supported: only default is",
        );
        check_refused(
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
            "`rope_scaling = \"llama3\"` is not supported: only null or the type \"default\" is",
        );
    }

    #[test]
    fn values_out_of_range_name_their_key() {
        let zero = |key| format!("`{key} = 0` is out of range: it must be at least 1");
        check_refused(json!({"vocab_size": 0}), &zero("vocab_size"));
        check_refused(json!({"num_hidden_layers": 0}), &zero("num_hidden_layers"));
        check_refused(json!({"num_key_value_heads": 0}), &zero("num_key_value_heads"));
        check_refused(json!({"max_position_embeddings": 0}), &zero("max_position_embeddings"));
        check_refused(
            json!({"num_attention_heads": 5}),
            "`hidden_size = 64` is not divisible by `num_attention_heads = 5`",
        );
        check_refused(
            json!({"num_key_value_heads": 3}),
            "`num_attention_heads = 4` is not divisible by `num_key_value_heads = 3`",
        );
        check_refused(
            json!({"head_dim": 15}),
            "`head_dim = 15` is out of range: it must be even, because the rotary embedding rotates pairs",
        );
        check_refused(json!({"rope_theta": -1.0}), "`rope_theta = -1` is out of range: it must be positive");
    }

    #[test]
    fn a_missing_key_is_named() {
        let error = serde_json::from_value::<DecoderConfig>(json!({"vocab_size": 2}))
            .map_err(|error| error.to_string());
        assert_eq!(error, Err("missing field `hidden_size`".to_owned()));
    }
}
