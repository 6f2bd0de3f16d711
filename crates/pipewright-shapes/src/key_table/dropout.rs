//! The keys that ask for dropout in training. Training here has none, so a file with such keys is read as if
//! they were 0, and the keys are named.

use serde_json::{Map, Value};

use super::table::{KeyTable, KeyUse};

/// Parts of the names of such keys: `attention_dropout`, `attn_pdrop`.
const PARTS: [&str; 2] = ["dropout", "pdrop"];

/// Returns whether a key is the share of elements that training drops.
pub fn is_dropout(key: &str) -> bool {
    PARTS.iter().any(|part| key.contains(part))
}

impl KeyTable {
    /// Returns the keys of a file that ask for dropout. Keys that belong to other uses of the model, such as
    /// `classifier_dropout`, do not count.
    pub fn dropout_keys(&self, json: &Value) -> Vec<String> {
        let keys = json.as_object().into_iter().flatten();
        let dropping = keys.filter(|(key, value)| self.drops(key, value));
        dropping.map(|(key, _)| key.clone()).collect()
    }

    /// Returns whether a key asks for dropout with this value.
    pub(crate) fn drops(&self, key: &str, value: &Value) -> bool {
        let is_share = value.as_f64().is_some_and(|share| share > 0.0 && share < 1.0);
        is_share && is_dropout(key) && self.use_of(key) != Some(KeyUse::Ignored)
    }

    /// Returns a file without dropout.
    pub fn without_dropout(&self, mut json: Value) -> Value {
        let dropping = self.dropout_keys(&json);
        if let Some(keys) = json.as_object_mut() {
            keys.extend(dropping.into_iter().map(|key| (key, 0.0.into())).collect::<Map<_, _>>());
        }
        json
    }
}
