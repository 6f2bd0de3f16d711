//! The error of a `config.json`.

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
