//! The table of a family's keys.

use serde_json::{Map, Value};

use super::harmless::{Harmless, Refused, is_off};
use super::names::{IGNORED, OTHERS, changes_computation};
use crate::error::ShapeError;

/// The keys that a family knows. Each field is a list of lists, so that families can share some of them.
#[derive(Debug)]
pub struct KeyTable {
    /// Keys whose values the family computes with.
    pub computes: &'static [&'static [&'static str]],
    /// Keys that do not change what training computes. `*` at the end of a name matches any letters.
    pub ignored: &'static [&'static [&'static str]],
    /// Keys that change the computation unless they have a harmless value.
    pub refused: &'static [&'static [Refused]],
}

/// A key of `config.json` whose value a family cannot compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedKey {
    /// The key.
    pub key: String,
    /// The value, or the part of it that is not supported.
    pub value: String,
    /// The values that are supported.
    pub only: String,
}

/// The meaning of a key for a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyUse {
    /// The family computes with it.
    Computes,
    /// It does not change what training computes.
    Ignored,
    /// It changes the computation unless it has a harmless value.
    Refused,
}

impl KeyTable {
    /// Returns whether the family computes with a key.
    pub fn computes(&self, key: &str) -> bool {
        self.computes.iter().any(|keys| keys.contains(&key))
    }

    /// Returns the keys that the family computes with.
    pub fn computed_keys(&self) -> impl Iterator<Item = &'static str> {
        self.computes.iter().flat_map(|keys| keys.iter().copied())
    }

    /// Returns what a key means; `None` if no table lists it.
    pub fn use_of(&self, key: &str) -> Option<KeyUse> {
        if self.refusal(key).is_some() {
            Some(KeyUse::Refused)
        } else if self.computes(key) {
            Some(KeyUse::Computes)
        } else if self.ignores(key) || is_ignored(key) {
            Some(KeyUse::Ignored)
        } else {
            refusal_of_others(key).map(|_| KeyUse::Refused)
        }
    }

    /// Returns whether a key does not change what the family computes in training.
    pub(crate) fn ignores(&self, key: &str) -> bool {
        let mut ignored = self.ignored.iter().flat_map(|keys| *keys);
        ignored.any(|ignored| match ignored.strip_suffix('*') {
            Some(start) => key.starts_with(start),
            None => key == *ignored,
        })
    }

    /// Returns the entry of a key that the family's own table refuses.
    fn refusal(&self, key: &str) -> Option<&'static Refused> {
        self.refused.iter().flat_map(|refused| *refused).find(|refused| refused.key == key)
    }

    /// Returns whether some values of a key are refused, and not this one.
    pub(crate) fn is_harmless(&self, key: &str, value: &Value, json: &Map<String, Value>) -> bool {
        let refusal = self.refusal(key).or_else(|| refusal_of_others(key));
        refusal.is_some_and(|refused| refused.harmless.holds(key, value, json))
    }

    /// Returns the values that a key may have, if its value turns off a part that all models of the family have, such
    /// as `rms_norm = false`. `is_read` says whether the reader uses the key or knows that it has no costs; then only
    /// flags count that the family's own table requires.
    pub(crate) fn instead_of_off(
        &self,
        key: &str,
        value: &Value,
        json: &Map<String, Value>,
        is_read: bool,
    ) -> Option<String> {
        let own = self.refusal(key).filter(|own| !is_read || matches!(own.harmless, Harmless::True));
        let others = if is_read { None } else { refusal_of_others(key) };
        let harmless = &own.or(others)?.harmless;
        (is_off(key, value) && !harmless.holds(key, value, json)).then(|| harmless.words())
    }

    /// Returns the keys of a file that the family cannot compute.
    pub fn refused(&self, json: &Map<String, Value>) -> Vec<RefusedKey> {
        json.iter().filter_map(|(key, value)| self.refuse(key, value, json)).collect()
    }

    fn refuse(&self, key: &str, value: &Value, json: &Map<String, Value>) -> Option<RefusedKey> {
        let refused = |shown: &Value, only: String| {
            let value = shown.as_str().map_or_else(|| shown.to_string(), str::to_owned);
            Some(RefusedKey { key: key.to_owned(), value: shortened(value), only })
        };
        match self.use_of(key) {
            Some(KeyUse::Computes | KeyUse::Ignored) => None,
            Some(KeyUse::Refused) => {
                let entry = self.refusal(key).or_else(|| refusal_of_others(key))?;
                let harmless = &entry.harmless;
                let holds = harmless.holds(key, value, json);
                if holds { None } else { refused(harmless.culprit(value), harmless.words()) }
            }
            None if changes_computation(key, value) => refused(value, "a model without this key".to_owned()),
            None => None,
        }
    }

    /// Returns an error if a file has keys that the family cannot compute.
    pub fn check(&self, json: &Value) -> Result<(), ShapeError> {
        let refused = json.as_object().map(|json| self.refused(json)).unwrap_or_default();
        match refused.as_slice() {
            [] => Ok(()),
            [RefusedKey { key, value, only }] => Err(ShapeError::not_supported(key, value, only)),
            [first, ..] => {
                let each = refused
                    .iter()
                    .map(|RefusedKey { key, value, only }| format!("`{key} = {value}` (only {only} is)"));
                let (count, each) = (refused.len(), each.collect::<Vec<_>>().join(", "));
                Err(ShapeError::new(&[&first.key], format!("{count} keys are not supported: {each}")))
            }
        }
    }

    /// Returns the keys of a file that no table lists and whose values may turn something on. Nobody knows
    /// what they mean. A key that asks for dropout is known by its name
    /// ([`dropout_keys`](Self::dropout_keys)).
    pub fn unknown_keys(&self, json: &Value) -> Vec<String> {
        let keys = json.as_object().into_iter().flatten();
        let unknown = keys.filter(|(key, value)| {
            // Names that begin with an underscore are internal to the library that wrote the file.
            let is_known = self.use_of(key).is_some() || self.drops(key, value);
            !is_off(key, value) && !key.starts_with('_') && !is_known
        });
        unknown.map(|(key, _)| key.clone()).collect()
    }
}

/// Returns the entry of a key in the list for all families.
fn refusal_of_others(key: &str) -> Option<&'static Refused> {
    OTHERS.iter().find(|refused| refused.key == key)
}

/// Returns whether a key changes nothing in the training of any family.
pub(crate) fn is_ignored(key: &str) -> bool {
    IGNORED.contains(&key)
}

/// Returns the beginning of a long value.
fn shortened(value: String) -> String {
    const LONGEST: usize = 60;
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &value[..end]),
        None => value,
    }
}
