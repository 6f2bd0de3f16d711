//! The configuration in the form of Hugging Face's `config.json`, in old and new versions. Absent keys get
//! defaults. Keys that families refuse are in [`family`](crate::family).

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::config::DecoderConfig;
use super::labels::{add_labels, labels_in};
use super::rope::RopeScaling;
use super::rope_json::{Lengths, read_rope, write_rope};

/// The length before the scaling, in files of Phi 3. Other files have it in the table of the positions.
const ORIGINAL_LENGTH: &str = "original_max_position_embeddings";

impl<'de> Deserialize<'de> for DecoderConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = Map::deserialize(deserializer)?;
        keys.retain(|_, value| !value.is_null());
        if let Some(heads) = keys.get("num_attention_heads").cloned() {
            keys.entry("num_key_value_heads").or_insert(heads);
        }
        // Files of transformers from version 5 have the first table, and older files have the second one.
        let tables = ["rope_parameters", "rope_scaling"].map(|name| keys.remove(name));
        let original = keys.remove(ORIGINAL_LENGTH).map(usize::deserialize).transpose();
        let original = original.map_err(D::Error::custom)?;
        let labels = labels_in(&keys).map_err(D::Error::custom)?.unwrap_or_default();
        let config = Self::deserialize(Value::Object(keys)).map_err(D::Error::custom)?;
        let lengths = Lengths { longest: config.max_position_embeddings, original };
        let rope = read_rope(tables[0].as_ref(), tables[1].as_ref(), lengths).map_err(D::Error::custom)?;
        let config = Self {
            rope_theta: rope.theta.unwrap_or(config.rope_theta),
            rope_scaling: rope.scaling,
            partial_rotary_factor: rope.rotated.unwrap_or(config.partial_rotary_factor),
            labels,
            ..config
        };
        config.validate().map_err(D::Error::custom)?;
        Ok(config)
    }
}

impl Serialize for DecoderConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let json = Self::serialize(self, serde_json::value::Serializer);
        let mut json = json.map_err(serde::ser::Error::custom)?;
        let (theta, rotated) = (self.rope_theta, self.partial_rotary_factor);
        json["rope_parameters"] = write_rope(theta, rotated, self.rope_scaling.as_ref());
        if let Some(RopeScaling::LongRope(long)) = &self.rope_scaling {
            json[ORIGINAL_LENGTH] = long.original_max_position_embeddings.into();
        }
        if !self.labels.is_empty() {
            add_labels(&mut json, &self.labels);
        }
        json.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::rope::Llama3Scaling;
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
        check_refused(
            json!({"rope_parameters": {"rope_type": "yarm"}}),
            "`rope_parameters.rope_type = yarm` is not supported: only default, linear, dynamic, yarn, longrope or llama3 is",
        );
        check_refused(
            json!({"rope_scaling": {"type": "ntk", "factor": 8.0}}),
            "`rope_scaling.rope_type = ntk` is not supported: only default, linear, dynamic, yarn, longrope or llama3 is",
        );
        check_refused(
            json!({"rope_scaling": {"factor": 8.0}}),
            "`rope_scaling.rope_type = null` is not supported: only default, linear, dynamic, yarn, longrope or llama3 is",
        );
    }

    /// The scaling of Llama 3.1 with some keys changed.
    fn llama3(change: Value) -> Value {
        let mut scaling = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192
        });
        scaling
            .as_object_mut()
            .expect("it is one")
            .append(change.clone().as_object_mut().expect("it is one"));
        scaling
    }

    #[test]
    fn the_scaling_of_llama3_is_read_in_both_places_and_written() {
        let scaling = RopeScaling::Llama3(Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        });
        let old = json!({"rope_theta": 5e5, "rope_scaling": llama3(json!({}))});
        let new = json!({"rope_parameters": llama3(json!({"rope_theta": 5e5}))});
        let (old, new) = (parse(old).expect("it is valid"), parse(new).expect("it is valid"));
        assert_eq!((old.rope_theta, old.rope_scaling.clone()), (5e5, Some(scaling)));
        assert_eq!(new, old);
        let written = serde_json::to_value(&old).expect("plain data");
        assert_eq!(serde_json::from_value::<DecoderConfig>(written).ok(), Some(old));
    }

    #[test]
    fn a_scaling_that_makes_no_sense_names_its_key() {
        let both = json!({"rope_parameters": {"rope_type": "default"}, "rope_scaling": llama3(json!({}))});
        check_refused(
            both,
            "`rope_scaling = another scaling` is not supported: only the same as in `rope_parameters` is",
        );
        let scaled = |change| json!({"rope_scaling": llama3(change)});
        check_refused(
            scaled(json!({"factor": 0.0})),
            "`rope_scaling.factor = 0` is out of range: it must be positive",
        );
        check_refused(
            scaled(json!({"high_freq_factor": 1.0})),
            "`rope_scaling.high_freq_factor = 1` is out of range: it must be above `low_freq_factor`",
        );
        check_refused(
            scaled(json!({"low_freq_factor": null})),
            "`rope_scaling.low_freq_factor` is missing or is not a number",
        );
        check_refused(
            json!({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}),
            "`rope_parameters.low_freq_factor` is missing or is not a number",
        );
        check_refused(
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            "`rope_parameters = {\"full_attention\":{\"rope_type\":\"default\"}}` is not supported: only one table for all layers is",
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
        check_refused(
            json!({"head_dim": 1u64 << 53}),
            "`head_dim = 9007199254740992` times `num_attention_heads = 4` is too wide: it must be at most 16777216",
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
