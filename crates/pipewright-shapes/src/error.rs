//! The error of a `config.json`.

use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;

/// A `config.json`, or a set of its keys, that does not describe a model. The message names the keys and says
/// what to do.
#[derive(Error)]
#[error("{message}")]
pub struct ShapeError {
    message: String,
    /// The most probable cause first.
    keys: Vec<String>,
    source: Option<serde_json::Error>,
}

pipewright_schedule::message_as_debug!(ShapeError);

impl ShapeError {
    /// Makes the error of some keys, the most probable cause first.
    pub fn new(keys: &[&str], message: String) -> Self {
        Self { message, keys: keys.iter().map(|&key| key.to_owned()).collect(), source: None }
    }

    /// Makes the error of a value that is not supported. `supported` completes "only ... is".
    pub fn not_supported(key: &str, value: &str, supported: &str) -> Self {
        Self::new(&[key], format!("`{key} = {value}` is not supported: only {supported} is"))
    }

    /// Makes the error of a key that is missing or has another kind of value. `what` completes "is not".
    pub fn missing(key: &str, what: &str) -> Self {
        Self::new(&[key], format!("`{key}` is missing or is not {what}"))
    }

    /// Makes the error of a missing key. `what` is the key, and may say more about it.
    pub fn missing_field(what: &str) -> Self {
        Self::new(&[], format!("missing field {what}"))
    }

    /// Makes the error of a key whose value the parser refuses.
    pub fn of_value(key: &str, source: serde_json::Error) -> Self {
        let error = Self::new(&[key], format!("the value of `{key}` cannot be used"));
        Self { source: Some(source), ..error }
    }

    /// Makes the error of `json`, which the parser refuses as an `F`, with the key that causes it, if there is one.
    /// Removing that key changes the error.
    ///
    /// The parser does not name the key, because the keys of a family and the keys of all families are flattened
    /// into one table.
    pub fn of_parser<F: DeserializeOwned>(json: &Value, source: serde_json::Error) -> Self {
        /// Files with more keys than any model has are not searched.
        const MOST_KEYS: usize = 256;
        const MISSING: &str = "missing field";
        let message = source.to_string();
        if message.starts_with('`') || message.starts_with(MISSING) {
            return source.into();
        }
        let without = |key: &str| {
            let mut json = json.clone();
            json.as_object_mut()?.remove(key);
            F::deserialize(json).err().map(|error| error.to_string())
        };
        let keys: Vec<&String> =
            json.as_object().into_iter().flat_map(|table| table.keys().take(MOST_KEYS)).collect();
        let errors: Vec<Option<String>> = keys.iter().map(|key| without(key)).collect();
        let find = |is_culprit: &dyn Fn(&Option<String>) -> bool| errors.iter().position(is_culprit);
        // The removal of a required key changes the error too, so the other keys are looked at first.
        let is_missing =
            |error: &Option<String>| error.as_ref().is_some_and(|error| error.starts_with(MISSING));
        let has_changed = |error: &Option<String>| error.as_ref() != Some(&message);
        let culprit = find(&|error| has_changed(error) && !is_missing(error)).or_else(|| find(&has_changed));
        match culprit {
            Some(index) => Self::of_value(keys[index], source),
            None => source.into(),
        }
    }

    /// Returns the error with the line of the file in front.
    pub(crate) fn at_line(self, line: usize) -> Self {
        Self { message: format!("line {line}: {}", self.message), ..self }
    }

    /// Returns the keys that cause the error, the most probable cause first. A key of a table is
    /// `table.key`.
    pub fn keys(&self) -> &[String] {
        &self.keys
    }
}

impl From<serde_json::Error> for ShapeError {
    fn from(error: serde_json::Error) -> Self {
        let message = error.to_string();
        // A refusal of a value comes through the parser as text, such as "`hidden_act = gelu` is not supported".
        let key = message.strip_prefix('`').and_then(|message| message.split([' ', '`']).next());
        Self { keys: key.map(str::to_owned).into_iter().collect(), message, source: None }
    }
}
