//! The configuration in the form of `config.json`, in the spelling of both generations of files. Settings that
//! change the results but are not implemented are errors.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::config::{BlockKind, Experts, NemotronHConfig};
use crate::error::ShapeError;
use crate::key_range::unknown_block;

/// A number that may be infinite, which JSON cannot write.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Named {
        #[serde(rename = "__float__")]
        name: String,
    },
}

impl Number {
    fn value(&self) -> Result<f64, ShapeError> {
        match self {
            Self::Finite(number) => Ok(*number),
            Self::Named { name } => name.parse().map_err(|_| {
                let supported = "a number or {\"__float__\": \"Infinity\"}";
                ShapeError::not_supported("time_step_limit", name, supported)
            }),
        }
    }

    fn json(number: f64) -> Value {
        if number.is_finite() { json!(number) } else { json!({"__float__": "Infinity"}) }
    }
}

const NAMES: &str = "`mamba` (or `linear_attention`), `attention` (or `full_attention`), `mlp` and `moe`";
const LETTERS: &str = "M (Mamba-2), * (attention), - (feed-forward) and E (experts)";

impl BlockKind {
    /// Returns the kind of a block by its name in a list, or its letter in a pattern.
    fn of(word: &str) -> Option<Self> {
        match word {
            "linear_attention" | "mamba" | "M" => Some(Self::Mamba),
            "full_attention" | "attention" | "*" => Some(Self::Attention),
            "mlp" | "-" => Some(Self::Mlp),
            "moe" | "E" => Some(Self::Experts),
            _ => None,
        }
    }
}

/// Returns the blocks of a list or a pattern; an error says which block is unknown.
fn blocks_of<W: AsRef<str>>(
    key: &str,
    words: impl Iterator<Item = W>,
    known: &str,
) -> Result<Vec<BlockKind>, ShapeError> {
    let block = |(index, word): (usize, W)| {
        let word = word.as_ref();
        let kind = BlockKind::of(word).filter(|_| (word.len() == 1) == (known == LETTERS));
        kind.ok_or_else(|| unknown_block(key, index, word, known))
    };
    words.enumerate().map(block).collect()
}

/// The keys that a model with blocks of experts needs.
const SIZES_OF_EXPERTS: [&str; 3] =
    ["n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"];

/// The keys of a file.
struct Keys(Map<String, Value>);

impl Keys {
    /// Returns the value of a key, if the file has it.
    fn optional<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, ShapeError> {
        Ok(self.0.get(key).map(T::deserialize).transpose()?)
    }

    /// Returns the blocks of the list or of the pattern, which must agree if both are written.
    fn blocks(&self) -> Result<Vec<BlockKind>, ShapeError> {
        let (list, pattern) = ("layers_block_type", "hybrid_override_pattern");
        let listed = self.optional::<Vec<String>>(list)?;
        let listed = listed.map(|names| blocks_of(list, names.iter(), NAMES)).transpose()?;
        let letters = self.optional::<String>(pattern)?;
        let lettered =
            letters.as_ref().map(|letters| blocks_of(pattern, letters.chars().map(String::from), LETTERS));
        match (listed, lettered.transpose()?) {
            (Some(listed), Some(lettered)) if listed != lettered => Err(ShapeError::not_supported(
                pattern,
                &letters.unwrap_or_default(),
                "the same as in `layers_block_type`",
            )),
            (listed, lettered) => listed.or(lettered).ok_or_else(|| {
                ShapeError::missing_field(
                    "`layers_block_type` (or `hybrid_override_pattern`): the kinds of the blocks",
                )
            }),
        }
    }

    /// Requires that other names of the number that the norms add say the same. transformers ignores them, and
    /// reads files without `layer_norm_epsilon` as if it were 1e-5.
    fn check_epsilon(&self, epsilon: f64) -> Result<(), ShapeError> {
        for key in ["norm_eps", "rms_norm_eps"] {
            if let Some(other) = self.optional::<f64>(key)?.filter(|other| *other != epsilon) {
                let supported = "the same as `layer_norm_epsilon`, which is 1e-5 in a file without it,";
                return Err(ShapeError::not_supported(key, &other.to_string(), supported));
            }
        }
        Ok(())
    }

    /// Returns the experts of a model that has blocks with them.
    fn experts(&self, mlp_bias: bool) -> Result<Experts, ShapeError> {
        if let Some(shared) = self.optional::<usize>("n_shared_experts")?.filter(|shared| *shared != 1) {
            return Err(ShapeError::not_supported("n_shared_experts", &shared.to_string(), "1"));
        }
        if mlp_bias {
            return Err(ShapeError::not_supported("mlp_bias", "true", "false, in a model with experts"));
        }
        match SIZES_OF_EXPERTS.into_iter().find(|key| !self.0.contains_key(*key)) {
            Some(key) => {
                let which = format!("`{key}`, which a model with blocks of experts needs");
                Err(ShapeError::missing_field(&which))
            }
            None => Ok(Experts::deserialize(Value::Object(self.0.clone()))?),
        }
    }

    fn config(mut self) -> Result<NemotronHConfig, ShapeError> {
        self.0.retain(|_, value| !value.is_null());
        if let Some(key) = ["vocab_size", "hidden_size"].into_iter().find(|key| !self.0.contains_key(*key)) {
            return Err(ShapeError::missing_field(&format!("`{key}`")));
        }
        if let (false, Some(width)) = (self.0.contains_key("head_dim"), self.0.get("attention_head_dim")) {
            self.0.insert("head_dim".to_owned(), width.clone());
        }
        let mut config = NemotronHConfig::deserialize(Value::Object(self.0.clone()))?;
        config.blocks = self.blocks()?;
        if config.blocks.contains(&BlockKind::Experts) {
            config.experts = Some(self.experts(config.mlp_bias)?);
        } else {
            // The keys of experts have no effect, and must have values of their kinds all the same.
            let mut keys = self.0.clone();
            for key in SIZES_OF_EXPERTS {
                keys.entry(key).or_insert(1.into());
            }
            Experts::deserialize(Value::Object(keys))?;
        }
        if let Some([low, high]) = self.optional::<[Number; 2]>("time_step_limit")? {
            config.time_step_limit = (low.value()?, high.value()?);
        }
        self.check_epsilon(config.layer_norm_epsilon)?;
        let (least, most) = config.time_step_range;
        let [low, high] = [self.optional("time_step_min")?, self.optional("time_step_max")?];
        config.time_step_range = (low.unwrap_or(least), high.unwrap_or(most));
        config.validate()?;
        Ok(config)
    }
}

impl<'de> Deserialize<'de> for NemotronHConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Keys(Map::deserialize(deserializer)?).config().map_err(D::Error::custom)
    }
}

impl Serialize for NemotronHConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (low, high) = self.time_step_limit;
        let mut json =
            Self::serialize(self, serde_json::value::Serializer).map_err(serde::ser::Error::custom)?;
        json["mlp_hidden_act"] = "relu2".into();
        json["mamba_hidden_act"] = "silu".into();
        json["time_step_limit"] = json!([Number::json(low), Number::json(high)]);
        json["time_step_min"] = self.time_step_range.0.into();
        json["time_step_max"] = self.time_step_range.1.into();
        if self.experts.is_some() {
            json["n_shared_experts"] = 1.into();
        }
        json.serialize(serializer)
    }
}
