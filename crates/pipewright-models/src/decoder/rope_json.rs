//! Reads the settings of the rotary positions: `rope_parameters` of version 5 of transformers, and
//! `rope_scaling` of version
//! 4. Every key of such a table must be known and must have an effect.

use serde_json::{Map, Value};

use super::rope::{RopeKeys, RopeScaling};
use crate::error::ConfigError;

/// The rotary positions as `rope_parameters` and `rope_scaling` give them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rope {
    /// The base, if a table has it. It counts more than `rope_theta` outside of the tables, as in
    /// transformers.
    pub(super) theta: Option<f64>,
    pub(super) scaling: Option<RopeScaling>,
}

const PARAMETERS: RopeKeys = RopeKeys {
    table: "rope_parameters",
    rope_type: "rope_parameters.rope_type",
    theta: "rope_parameters.rope_theta",
    factor: "rope_parameters.factor",
    low: "rope_parameters.low_freq_factor",
    high: "rope_parameters.high_freq_factor",
    length: "rope_parameters.original_max_position_embeddings",
    rotated: "rope_parameters.partial_rotary_factor",
};
const SCALING: RopeKeys = RopeKeys {
    table: "rope_scaling",
    rope_type: "rope_scaling.rope_type",
    theta: "rope_scaling.rope_theta",
    factor: "rope_scaling.factor",
    low: "rope_scaling.low_freq_factor",
    high: "rope_scaling.high_freq_factor",
    length: "rope_scaling.original_max_position_embeddings",
    rotated: "rope_scaling.partial_rotary_factor",
};

/// The keys with a meaning for every type, and the keys for the type `llama3`.
const OF_ALL: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
const OF_LLAMA3: [&str; 4] =
    ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];

/// Reads both tables. A file usually has one of them. `longest` is the file's `max_position_embeddings`.
pub(super) fn read_rope(
    parameters: Option<&Value>,
    scaling: Option<&Value>,
    longest: Option<usize>,
) -> Result<Rope, ConfigError> {
    let read = |table: Option<&Value>, keys| {
        let table = table.filter(|table| !table.is_null());
        table.map(|table| read_table(table, keys, longest)).transpose()
    };
    let (own, other) = (read(parameters, &PARAMETERS)?, read(scaling, &SCALING)?);
    match (own, other) {
        (Some(own), Some(other)) if own.scaling != other.scaling || differ(own.theta, other.theta) => {
            Err(ConfigError::NotSupported {
                key: SCALING.table,
                value: "another scaling".to_owned(),
                supported: "the same as in `rope_parameters`",
            })
        }
        (Some(own), Some(other)) => Ok(Rope { theta: own.theta.or(other.theta), ..own }),
        (one, other) => Ok(one.or(other).unwrap_or_default()),
    }
}

fn differ(one: Option<f64>, other: Option<f64>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if one != other)
}

/// Reads one of the two tables.
fn read_table(table: &Value, keys: &RopeKeys, longest: Option<usize>) -> Result<Rope, ConfigError> {
    let refuse = |key, value: &Value, supported| {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Err(ConfigError::NotSupported { key, value, supported })
    };
    let Some(entries) = table.as_object().filter(|entries| !is_nested(entries)) else {
        return refuse(keys.table, table, "one table for all layers");
    };
    let entry = |name: &str| entries.get(name).filter(|value| !value.is_null());
    let rope_type = entry("rope_type").or_else(|| entry("type"));
    let is_llama3 = match rope_type.map(|name| name.as_str().unwrap_or_default()) {
        None | Some("default") => false,
        Some("llama3") => true,
        Some(_) => return refuse(keys.rope_type, rope_type.unwrap_or(&Value::Null), SUPPORTED),
    };
    if rope_type.is_none() && entry("factor").is_some() {
        return refuse(keys.rope_type, &Value::Null, SUPPORTED);
    }
    require_known(entries, keys, is_llama3)?;
    if let Some(share) = entry("partial_rotary_factor").filter(|share| share.as_f64() != Some(1.0)) {
        return refuse(keys.rotated, share, "1");
    }
    let theta = entry("rope_theta");
    let theta = theta.map(|theta| theta.as_f64().ok_or(ConfigError::NotANumber { key: keys.theta }));
    let scaling = if is_llama3 { Some(read_llama3(entries, keys, longest)?) } else { None };
    Ok(Rope { theta: theta.transpose()?, scaling })
}

const SUPPORTED: &str = "default or llama3";

/// Returns whether a table has a table for each type of layer. A number such as NaN is an object with one key
/// too.
fn is_nested(entries: &Map<String, Value>) -> bool {
    entries.values().any(|value| value.as_object().is_some_and(|value| !value.contains_key("__float__")))
}

/// Refuses a key that has no meaning for the type.
fn require_known(entries: &Map<String, Value>, keys: &RopeKeys, is_llama3: bool) -> Result<(), ConfigError> {
    let is_known = |key: &str| OF_ALL.contains(&key) || (is_llama3 && OF_LLAMA3.contains(&key));
    let unknown = entries.iter().find(|(key, value)| !is_known(key) && !value.is_null());
    let Some((key, _)) = unknown else { return Ok(()) };
    let known = OF_ALL.iter().chain(if is_llama3 { OF_LLAMA3.iter() } else { [].iter() });
    Err(ConfigError::UnknownEntry {
        table: keys.table,
        key: key.as_str().into(),
        rope_type: if is_llama3 { "llama3" } else { "default" },
        known: known.copied().collect(),
    })
}

fn read_llama3(
    entries: &Map<String, Value>,
    keys: &RopeKeys,
    longest: Option<usize>,
) -> Result<RopeScaling, ConfigError> {
    let number = |key: &'static str| {
        let name = key.rsplit('.').next().unwrap_or(key);
        entries.get(name).and_then(Value::as_f64).ok_or(ConfigError::NotANumber { key })
    };
    let (factor, low_freq_factor, high_freq_factor) =
        (number(keys.factor)?, number(keys.low)?, number(keys.high)?);
    // Like transformers, this takes the length of the model if the table does not have the length before the
    // scaling.
    let length = match entries.get("original_max_position_embeddings").filter(|length| !length.is_null()) {
        None => longest.ok_or(ConfigError::NotANumber { key: keys.length })?,
        Some(length) => length
            .as_u64()
            .and_then(|length| usize::try_from(length).ok())
            .ok_or(ConfigError::NotANumber { key: keys.length })?,
    };
    let scaling =
        RopeScaling { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: length };
    scaling.validate(keys)?;
    Ok(scaling)
}
