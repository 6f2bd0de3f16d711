//! The values with which a key changes nothing.

use serde_json::{Map, Value};

/// A key that changes the computation unless it has a harmless value. `null` is always harmless.
#[derive(Debug)]
pub struct Refused {
    /// The key.
    pub key: &'static str,
    /// The values with which it changes nothing.
    pub harmless: Harmless,
}

/// The values other than `null` with which a key changes nothing.
#[derive(Debug)]
pub enum Harmless {
    /// None.
    Nothing,
    /// `false`.
    False,
    /// `true`.
    True,
    /// This number.
    Number(f64),
    /// This word.
    Word(&'static str),
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A list of this word only.
    AllOf(&'static str),
    /// A list or table without entries.
    Empty,
    /// The value of this key.
    SameAs(&'static str),
    /// Any value, if this key is `false`.
    Without(&'static str),
}

impl Harmless {
    /// Returns whether a key of the file `json` changes nothing with this value.
    pub(crate) fn holds(&self, key: &str, value: &Value, json: &Map<String, Value>) -> bool {
        match self {
            _ if value.is_null() => true,
            Self::Nothing | Self::False | Self::Empty if is_off(key, value) => true,
            Self::Number(number) if *number == 0.0 && is_off(key, value) => true,
            Self::Nothing => false,
            Self::False => value == &Value::Bool(false),
            Self::True => value == &Value::Bool(true),
            Self::Number(number) => value.as_f64() == Some(*number),
            Self::Word(word) => value.as_str() == Some(word),
            Self::OneOf(words) => value.as_str().is_some_and(|found| words.contains(&found)),
            Self::AllOf(word) => {
                value.as_array().is_some_and(|items| items.iter().all(|item| item.as_str() == Some(word)))
            }
            Self::Empty => is_empty(value),
            Self::SameAs(other) => json.get(*other) == Some(value),
            Self::Without(flag) => json.get(*flag) == Some(&Value::Bool(false)),
        }
    }

    /// Returns the part of a harmful value that is harmful.
    pub(crate) fn culprit<'v>(&self, value: &'v Value) -> &'v Value {
        let Self::AllOf(word) = self else { return value };
        let other = |item: &&Value| item.as_str() != Some(word);
        value.as_array().and_then(|items| items.iter().find(other)).unwrap_or(value)
    }

    /// Completes "only ... is supported".
    pub(crate) fn words(&self) -> String {
        match self {
            Self::Nothing | Self::Without(_) => "null".to_owned(),
            Self::SameAs(other) => format!("the value of `{other}`"),
            Self::False => "false".to_owned(),
            Self::True => "true".to_owned(),
            Self::Number(number) => number.to_string(),
            Self::Word(word) | Self::AllOf(word) => (*word).to_owned(),
            Self::OneOf(words) => words.join(" or "),
            Self::Empty => "an empty one".to_owned(),
        }
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(keys) => keys.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// Parts of the names of keys with which 0 is a value like any other.
const FACTORS: [&str; 9] =
    ["scal", "multiplier", "theta", "eps", "factor", "pct", "percent", "fraction", "temperature"];

/// Returns whether a value turns a key off.
pub(crate) fn is_off(key: &str, value: &Value) -> bool {
    let is_factor = || FACTORS.iter().any(|part| key.contains(part));
    value.is_null()
        || value == &Value::Bool(false)
        || is_empty(value)
        || (value.as_f64() == Some(0.0) && !is_factor())
}
