//! Reads and writes the settings of the rotary positions: `rope_parameters` of version 5 of transformers, and
//! `rope_scaling` of version 4. Every key of such a table must be known and must have an effect.

use serde_json::{Map, Value, json};

use super::rope::{Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling};
use crate::error::ConfigError;
use crate::key_check::{above_zero, not_below_zero, require};

/// The rotary positions as `rope_parameters` and `rope_scaling` give them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rope {
    /// The base, if a table has it. It counts more than `rope_theta` outside of the tables, as in
    /// transformers.
    pub(super) theta: Option<f64>,
    /// The share of a head that is rotated, if a table has it.
    pub(super) rotated: Option<f64>,
    pub(super) scaling: Option<RopeScaling>,
}

/// The lengths that a file states outside of the tables.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    /// `max_position_embeddings`.
    pub(super) longest: Option<usize>,
    /// `original_max_position_embeddings`, which counts more than the one in a table, as in transformers.
    pub(super) original: Option<usize>,
}

/// The full names of the keys of a scaling, which two places of `config.json` may hold.
#[derive(Debug)]
struct RopeKeys {
    table: &'static str,
    rope_type: &'static str,
    theta: &'static str,
    rotated: &'static str,
    factor: &'static str,
    low: &'static str,
    high: &'static str,
    length: &'static str,
    attention_factor: &'static str,
    beta_fast: &'static str,
    beta_slow: &'static str,
    mscale: &'static str,
    mscale_all_dim: &'static str,
    truncate: &'static str,
    short_factor: &'static str,
    long_factor: &'static str,
}

macro_rules! keys_of {
    ($table:literal) => {
        RopeKeys {
            table: $table,
            rope_type: concat!($table, ".rope_type"),
            theta: concat!($table, ".rope_theta"),
            rotated: concat!($table, ".partial_rotary_factor"),
            factor: concat!($table, ".factor"),
            low: concat!($table, ".low_freq_factor"),
            high: concat!($table, ".high_freq_factor"),
            length: concat!($table, ".original_max_position_embeddings"),
            attention_factor: concat!($table, ".attention_factor"),
            beta_fast: concat!($table, ".beta_fast"),
            beta_slow: concat!($table, ".beta_slow"),
            mscale: concat!($table, ".mscale"),
            mscale_all_dim: concat!($table, ".mscale_all_dim"),
            truncate: concat!($table, ".truncate"),
            short_factor: concat!($table, ".short_factor"),
            long_factor: concat!($table, ".long_factor"),
        }
    };
}

const PARAMETERS: RopeKeys = keys_of!("rope_parameters");
const SCALING: RopeKeys = keys_of!("rope_scaling");

/// The keys with a meaning for every type.
const OF_ALL: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];

/// The types of positions, each with its further keys.
const TYPES: [(&str, &[&str]); 6] = [
    ("default", &[]),
    ("linear", &["factor"]),
    ("dynamic", &["factor"]),
    (
        "yarn",
        &[
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "original_max_position_embeddings",
        ],
    ),
    (
        "longrope",
        &["short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"],
    ),
    ("llama3", &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
];
const SUPPORTED: &str = "default, linear, dynamic, yarn, longrope or llama3";

/// Reads both tables. A file usually has one of them.
pub(super) fn read_rope(
    parameters: Option<&Value>,
    scaling: Option<&Value>,
    lengths: Lengths,
) -> Result<Rope, ConfigError> {
    let read = |table: Option<&Value>, keys| {
        let table = table.filter(|table| !table.is_null());
        table.map(|table| read_table(table, keys, lengths)).transpose()
    };
    let (own, other) = (read(parameters, &PARAMETERS)?, read(scaling, &SCALING)?);
    match (own, other) {
        (Some(own), Some(other))
            if own.scaling != other.scaling
                || differ(own.theta, other.theta)
                || differ(own.rotated, other.rotated) =>
        {
            Err(ConfigError::NotSupported {
                key: SCALING.table,
                value: "another scaling".to_owned(),
                supported: "the same as in `rope_parameters`",
            })
        }
        (Some(own), Some(other)) => {
            Ok(Rope { theta: own.theta.or(other.theta), rotated: own.rotated.or(other.rotated), ..own })
        }
        (one, other) => Ok(one.or(other).unwrap_or_default()),
    }
}

fn differ(one: Option<f64>, other: Option<f64>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if one != other)
}

/// One of the two tables.
#[derive(Clone, Copy)]
struct Table<'a> {
    entries: &'a Map<String, Value>,
    keys: &'static RopeKeys,
    lengths: Lengths,
}

/// Reads one of the two tables.
fn read_table(table: &Value, keys: &'static RopeKeys, lengths: Lengths) -> Result<Rope, ConfigError> {
    let Some(entries) = table.as_object().filter(|entries| !is_nested(entries)) else {
        return refuse(keys.table, table, "one table for all layers");
    };
    let entry = |name: &str| entries.get(name).filter(|value| !value.is_null());
    let rope_type = entry("rope_type").or_else(|| entry("type"));
    let name = match rope_type.map(|name| name.as_str().unwrap_or_default()) {
        None if entry("factor").is_some() => return refuse(keys.rope_type, &Value::Null, SUPPORTED),
        None => "default",
        Some(name) => name,
    };
    let Some(&(name, known)) = TYPES.iter().find(|(known, _)| *known == name) else {
        return refuse(keys.rope_type, rope_type.unwrap_or(&Value::Null), SUPPORTED);
    };
    require_known(entries, keys, name, known)?;
    let table = Table { entries, keys, lengths };
    let scaling = match name {
        "linear" => Some(RopeScaling::Linear { factor: table.positive(keys.factor)? }),
        "dynamic" => Some(RopeScaling::Dynamic { factor: table.positive(keys.factor)? }),
        "yarn" => Some(RopeScaling::Yarn(table.yarn()?)),
        "longrope" => Some(RopeScaling::LongRope(table.longrope()?)),
        "llama3" => Some(RopeScaling::Llama3(table.llama3()?)),
        _ => None,
    };
    Ok(Rope { theta: table.optional(keys.theta)?, rotated: table.optional(keys.rotated)?, scaling })
}

fn refuse<T>(key: &'static str, value: &Value, supported: &'static str) -> Result<T, ConfigError> {
    let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    Err(ConfigError::NotSupported { key, value, supported })
}

/// Returns whether a table has a table for each type of layer. A number such as NaN is an object with one key
/// too.
fn is_nested(entries: &Map<String, Value>) -> bool {
    entries.values().any(|value| value.as_object().is_some_and(|value| !value.contains_key("__float__")))
}

/// Refuses a key that has no meaning for the type.
fn require_known(
    entries: &Map<String, Value>,
    keys: &RopeKeys,
    rope_type: &'static str,
    further: &[&'static str],
) -> Result<(), ConfigError> {
    let known = || OF_ALL.iter().chain(further);
    let is_known = |key: &str| known().any(|known| *known == key);
    let unknown = entries.iter().find(|(key, value)| !is_known(key) && !value.is_null());
    let Some((key, _)) = unknown else { return Ok(()) };
    Err(ConfigError::UnknownEntry {
        table: keys.table,
        key: key.as_str().into(),
        rope_type,
        known: known().copied().collect(),
    })
}

impl Table<'_> {
    /// Returns the value of a key, which is given with the name of its table.
    fn value(&self, key: &'static str) -> Option<&Value> {
        let name = key.rsplit('.').next().unwrap_or(key);
        self.entries.get(name).filter(|value| !value.is_null())
    }

    fn optional(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        let number = |value: &Value| value.as_f64().ok_or(ConfigError::NotANumber { key });
        self.value(key).map(number).transpose()
    }

    fn number(&self, key: &'static str) -> Result<f64, ConfigError> {
        self.optional(key)?.ok_or(ConfigError::NotANumber { key })
    }

    fn positive(&self, key: &'static str) -> Result<f64, ConfigError> {
        let number = self.number(key)?;
        above_zero(&[(key, number)])?;
        Ok(number)
    }

    fn not_negative(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        let number = self.optional(key)?;
        number.map_or(Ok(()), |number| not_below_zero(&[(key, number)]))?;
        Ok(number)
    }

    fn optional_positive(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        self.value(key).map(|_| self.positive(key)).transpose()
    }

    /// Returns the length of the sequences before the scaling. Like transformers, this takes the length of
    /// the model if the file does not have that length.
    fn original_length(&self) -> Result<usize, ConfigError> {
        let key = self.keys.length;
        let own = self.value(key).map(|length| {
            let length = length.as_u64().and_then(|length| usize::try_from(length).ok());
            length.ok_or(ConfigError::NotANumber { key })
        });
        let length = self.lengths.original.or(own.transpose()?).or(self.lengths.longest);
        let length = length.ok_or(ConfigError::NotANumber { key })?;
        require(length > 0, key, length, "at least 1")?;
        Ok(length)
    }

    fn llama3(&self) -> Result<Llama3Scaling, ConfigError> {
        let (factor, low, high) = (self.keys.factor, self.keys.low, self.keys.high);
        let (factor, low_freq_factor) = (self.positive(factor)?, self.positive(low)?);
        let high_freq_factor = self.number(high)?;
        let is_above = high_freq_factor.is_finite() && high_freq_factor > low_freq_factor;
        require(is_above, high, high_freq_factor, "above `low_freq_factor`")?;
        let original_max_position_embeddings = self.original_length()?;
        Ok(Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings })
    }

    fn yarn(&self) -> Result<YarnScaling, ConfigError> {
        let keys = self.keys;
        let original = self.original_length()?;
        let truncate = self
            .value(keys.truncate)
            .map(|value| value.as_bool().map_or_else(|| refuse(keys.truncate, value, "true or false"), Ok));
        let factor = match (self.optional_positive(keys.factor)?, self.lengths.longest) {
            (Some(factor), _) => factor,
            (None, Some(longest)) => longest as f64 / original as f64,
            (None, None) => return Err(ConfigError::NotANumber { key: keys.factor }),
        };
        Ok(YarnScaling {
            factor,
            attention_factor: self.optional_positive(keys.attention_factor)?,
            beta_fast: self.optional_positive(keys.beta_fast)?.unwrap_or(32.0),
            beta_slow: self.optional_positive(keys.beta_slow)?.unwrap_or(1.0),
            mscale: self.not_negative(keys.mscale)?,
            mscale_all_dim: self.not_negative(keys.mscale_all_dim)?,
            truncate: truncate.transpose()?.unwrap_or(true),
            original_max_position_embeddings: original,
        })
    }

    fn longrope(&self) -> Result<LongRopeScaling, ConfigError> {
        let divisors = |key| {
            let numbers = self.value(key).and_then(Value::as_array).ok_or(ConfigError::NotAList { key })?;
            let positive =
                |number: &Value| number.as_f64().filter(|number| number.is_finite() && *number > 0.0);
            let numbers: Option<Vec<f64>> = numbers.iter().map(positive).collect();
            numbers.ok_or(ConfigError::NotAList { key })
        };
        Ok(LongRopeScaling {
            short_factor: divisors(self.keys.short_factor)?,
            long_factor: divisors(self.keys.long_factor)?,
            factor: self.optional_positive(self.keys.factor)?,
            attention_factor: self.optional_positive(self.keys.attention_factor)?,
            original_max_position_embeddings: self.original_length()?,
        })
    }
}

/// Returns the content of `rope_parameters`.
pub(super) fn write_rope(theta: f64, rotated: f64, scaling: Option<&RopeScaling>) -> Value {
    let mut table = match scaling {
        None => json!({"rope_type": "default"}),
        Some(RopeScaling::Linear { factor }) => json!({"rope_type": "linear", "factor": factor}),
        Some(RopeScaling::Dynamic { factor }) => json!({"rope_type": "dynamic", "factor": factor}),
        Some(RopeScaling::Yarn(yarn)) => json!({
            "rope_type": "yarn",
            "factor": yarn.factor,
            "attention_factor": yarn.attention_factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
            "truncate": yarn.truncate,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
        }),
        Some(RopeScaling::LongRope(long)) => json!({
            "rope_type": "longrope",
            "short_factor": long.short_factor,
            "long_factor": long.long_factor,
            "factor": long.factor,
            "attention_factor": long.attention_factor,
            "original_max_position_embeddings": long.original_max_position_embeddings,
        }),
        Some(RopeScaling::Llama3(llama)) => json!({
            "rope_type": "llama3",
            "factor": llama.factor,
            "low_freq_factor": llama.low_freq_factor,
            "high_freq_factor": llama.high_freq_factor,
            "original_max_position_embeddings": llama.original_max_position_embeddings,
        }),
    };
    if let Some(entries) = table.as_object_mut() {
        entries.retain(|_, value| !value.is_null());
        entries.insert("rope_theta".to_owned(), theta.into());
        if rotated != 1.0 {
            entries.insert("partial_rotary_factor".to_owned(), rotated.into());
        }
    }
    table
}
