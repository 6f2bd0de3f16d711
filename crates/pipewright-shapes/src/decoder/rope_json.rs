//! Reads and writes the settings of the rotary positions: `rope_parameters` of version 5 of transformers, and
//! `rope_scaling` of version 4. Every key of such a table must be known and must have an effect.

use serde_json::{Map, Value, json};

use super::rope::{Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling};
use crate::error::ShapeError;
use crate::key_range::{above_zero, not_below_zero, require};

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
) -> Result<Rope, ShapeError> {
    let read = |table: Option<&Value>, name| {
        let entries = table.filter(|table| !table.is_null());
        entries.map(|entries| read_table(entries, name, lengths)).transpose()
    };
    let (own, other) = (read(parameters, "rope_parameters")?, read(scaling, "rope_scaling")?);
    match (own, other) {
        (Some(own), Some(other))
            if own.scaling != other.scaling
                || differ(own.theta, other.theta)
                || differ(own.rotated, other.rotated) =>
        {
            let supported = "the same as in `rope_parameters`";
            Err(ShapeError::not_supported("rope_scaling", "another scaling", supported))
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
    name: &'static str,
    entries: &'a Map<String, Value>,
    lengths: Lengths,
}

/// Reads one of the two tables.
fn read_table(table: &Value, name: &'static str, lengths: Lengths) -> Result<Rope, ShapeError> {
    let Some(entries) = table.as_object().filter(|entries| !is_nested(entries)) else {
        return Err(refused(name, table, "one table for all layers"));
    };
    let table = Table { name, entries, lengths };
    let rope_type = table.value("rope_type").or_else(|| table.value("type"));
    let not_supported = || refused(&table.full("rope_type"), rope_type.unwrap_or(&Value::Null), SUPPORTED);
    let rope_name = match rope_type.map(|name| name.as_str().unwrap_or_default()) {
        None if table.value("factor").is_some() => return Err(not_supported()),
        None => "default",
        Some(name) => name,
    };
    let known = TYPES.iter().find(|(known, _)| *known == rope_name);
    let &(rope_name, further) = known.ok_or_else(not_supported)?;
    table.require_known(rope_name, further)?;
    let scaling = match rope_name {
        "linear" => Some(RopeScaling::Linear { factor: table.positive("factor")? }),
        "dynamic" => Some(RopeScaling::Dynamic { factor: table.positive("factor")? }),
        "yarn" => Some(RopeScaling::Yarn(table.yarn()?)),
        "longrope" => Some(RopeScaling::LongRope(table.longrope()?)),
        "llama3" => Some(RopeScaling::Llama3(table.llama3()?)),
        _ => None,
    };
    let (theta, rotated) = (table.optional("rope_theta")?, table.optional("partial_rotary_factor")?);
    Ok(Rope { theta, rotated, scaling })
}

fn refused(key: &str, value: &Value, supported: &str) -> ShapeError {
    let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    ShapeError::not_supported(key, &value, supported)
}

/// Returns whether a table has a table for each type of layer. A number such as NaN is an object with one key
/// too.
fn is_nested(entries: &Map<String, Value>) -> bool {
    entries.values().any(|value| value.as_object().is_some_and(|value| !value.contains_key("__float__")))
}

impl Table<'_> {
    /// Refuses a key that has no meaning for a type of positions, which has these further keys.
    fn require_known(&self, rope_type: &str, further: &[&str]) -> Result<(), ShapeError> {
        let known: Vec<&str> = OF_ALL.iter().chain(further).copied().collect();
        let is_unknown =
            |(key, value): &(&String, &Value)| !known.contains(&key.as_str()) && !value.is_null();
        let Some((key, _)) = self.entries.iter().find(is_unknown) else { return Ok(()) };
        let (key, known) = (self.full(key), known.join(", "));
        let message = format!(
            "`{key}` is not a key of the type `{rope_type}`, whose keys are {known}: correct it, or remove it"
        );
        Err(ShapeError::new(&[&key], message))
    }

    /// Returns a key with the name of its table.
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.entries.get(key).filter(|value| !value.is_null())
    }

    /// Returns the error of a key that is missing or has another kind of value. `what` completes "is not".
    fn missing(&self, key: &str, what: &str) -> ShapeError {
        ShapeError::missing(&self.full(key), what)
    }

    fn optional(&self, key: &str) -> Result<Option<f64>, ShapeError> {
        let number = |value: &Value| value.as_f64().ok_or_else(|| self.missing(key, "a number"));
        self.value(key).map(number).transpose()
    }

    fn number(&self, key: &str) -> Result<f64, ShapeError> {
        self.optional(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    fn positive(&self, key: &str) -> Result<f64, ShapeError> {
        let number = self.number(key)?;
        above_zero(&[(&self.full(key), number)])?;
        Ok(number)
    }

    fn not_negative(&self, key: &str) -> Result<Option<f64>, ShapeError> {
        let number = self.optional(key)?;
        number.map_or(Ok(()), |number| not_below_zero(&[(&self.full(key), number)]))?;
        Ok(number)
    }

    fn optional_positive(&self, key: &str) -> Result<Option<f64>, ShapeError> {
        self.value(key).map(|_| self.positive(key)).transpose()
    }

    /// Returns the length of the sequences before the scaling. Like transformers, this takes the length of
    /// the model if the file does not have that length.
    fn original_length(&self) -> Result<usize, ShapeError> {
        let key = "original_max_position_embeddings";
        let missing = || self.missing(key, "a number");
        let own = self.value(key).map(|length| {
            let length = length.as_u64().and_then(|length| usize::try_from(length).ok());
            length.ok_or_else(missing)
        });
        let length = self.lengths.original.or(own.transpose()?).or(self.lengths.longest);
        let length = length.ok_or_else(missing)?;
        require(length > 0, &self.full(key), length, "at least 1")?;
        Ok(length)
    }

    fn llama3(&self) -> Result<Llama3Scaling, ShapeError> {
        let (factor, low_freq_factor) = (self.positive("factor")?, self.positive("low_freq_factor")?);
        let high_freq_factor = self.number("high_freq_factor")?;
        let is_above = high_freq_factor.is_finite() && high_freq_factor > low_freq_factor;
        require(is_above, &self.full("high_freq_factor"), high_freq_factor, "above `low_freq_factor`")?;
        let original_max_position_embeddings = self.original_length()?;
        Ok(Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings })
    }

    fn yarn(&self) -> Result<YarnScaling, ShapeError> {
        let original = self.original_length()?;
        let flag = |value: &Value| {
            value.as_bool().ok_or_else(|| refused(&self.full("truncate"), value, "true or false"))
        };
        let factor = match (self.optional_positive("factor")?, self.lengths.longest) {
            (Some(factor), _) => factor,
            (None, Some(longest)) => longest as f64 / original as f64,
            (None, None) => return Err(self.missing("factor", "a number")),
        };
        Ok(YarnScaling {
            factor,
            attention_factor: self.optional_positive("attention_factor")?,
            beta_fast: self.optional_positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.optional_positive("beta_slow")?.unwrap_or(1.0),
            mscale: self.not_negative("mscale")?,
            mscale_all_dim: self.not_negative("mscale_all_dim")?,
            truncate: self.value("truncate").map(flag).transpose()?.unwrap_or(true),
            original_max_position_embeddings: original,
        })
    }

    fn longrope(&self) -> Result<LongRopeScaling, ShapeError> {
        let divisors = |key| {
            let positive =
                |number: &Value| number.as_f64().filter(|number| number.is_finite() && *number > 0.0);
            let numbers = self.value(key).and_then(Value::as_array);
            let numbers =
                numbers.and_then(|numbers| numbers.iter().map(positive).collect::<Option<Vec<_>>>());
            numbers.ok_or_else(|| self.missing(key, "a list of positive numbers"))
        };
        Ok(LongRopeScaling {
            short_factor: divisors("short_factor")?,
            long_factor: divisors("long_factor")?,
            factor: self.optional_positive("factor")?,
            attention_factor: self.optional_positive("attention_factor")?,
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
