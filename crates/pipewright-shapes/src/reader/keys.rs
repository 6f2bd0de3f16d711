//! The keys of a `config.json`, and which of them are used.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::error::ShapeError;
use crate::family::Family;
pub(super) use crate::key_range::MAX_BLOCKS;
use crate::key_table::is_off;

/// The largest size of a part. Published models have at most some ten thousand.
pub(super) const MAX_SIZE: u64 = 1 << 20;
/// The largest vocabulary.
pub(super) const MAX_VOCABULARY: u64 = 1 << 28;

/// The keys of a configuration, and which of them are used.
pub(super) struct Keys<'a> {
    object: &'a Map<String, Value>,
    family: Family,
    used: BTreeSet<String>,
    /// The defaults that were used.
    filled: BTreeSet<(&'static str, u64)>,
}

/// A value as messages repeat it.
fn shortened(value: &Value) -> String {
    value.to_string().chars().take(64).collect()
}

impl<'a> Keys<'a> {
    pub(super) fn new(object: &'a Map<String, Value>) -> Self {
        Self { object, family: Family::unknown(), used: BTreeSet::new(), filled: BTreeSet::new() }
    }

    /// Sets the values that a family has for keys that the file leaves out.
    pub(super) fn set_family(&mut self, family: &Family) {
        self.family = *family;
    }

    /// Returns the keys that have the values of their family because the file leaves them out.
    pub(super) fn filled(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.filled.iter().copied()
    }

    /// Notes that a key, which the file leaves out, has a value of its family, and returns the value.
    pub(super) fn fill(&mut self, name: &'static str, value: u64) -> u64 {
        self.filled.insert((name, value));
        value
    }

    /// Takes back that a missing key has the value of its family.
    pub(super) fn empty(&mut self, name: &str) {
        self.filled.retain(|(filled, _)| *filled != name);
    }

    /// Returns whether a key is given and not null.
    pub(super) fn has(&self, name: &str) -> bool {
        let is_given = |value: &Value| !value.is_null();
        !self.family.foreign.contains(&name) && self.object.get(name).is_some_and(is_given)
    }

    /// Marks a key as used.
    pub(super) fn mark(&mut self, names: &[&str]) {
        self.used.extend(names.iter().map(|&name| name.to_owned()));
    }

    /// Returns the first of these keys that is given and not null.
    pub(super) fn value(&mut self, names: &[&str]) -> Option<(String, &'a Value)> {
        self.mark(names);
        let name = names.iter().find(|&&name| self.has(name))?;
        Some(((*name).to_owned(), &self.object[*name]))
    }

    /// Returns a size under the first of its names that is given, or the family's value.
    pub(super) fn size(&mut self, names: &[&str], least: u64, most: u64) -> Result<Option<u64>, ShapeError> {
        let Some((key, value)) = self.value(names) else {
            // A value of null means that the value follows from other keys.
            let is_missing = |(name, _): &(&str, u64)| !self.object.contains_key(*name);
            let usual = self.family.usual_size(names).filter(is_missing);
            self.filled.extend(usual);
            let mut fixed = self.family.fixed.iter().copied().filter(|(name, _)| names.contains(name));
            return Ok(usual.or_else(|| fixed.find(is_missing)).map(|(_, value)| value));
        };
        match value.as_u64().filter(|size| (least..=most).contains(size)) {
            Some(size) => Ok(Some(size)),
            None => Err(wrong(key, value, &format!("a whole number from {least} to {most}"))),
        }
    }

    pub(super) fn needed(&mut self, names: &[&str]) -> Result<u64, ShapeError> {
        self.needed_up_to(names, MAX_SIZE)
    }

    pub(super) fn needed_up_to(&mut self, names: &[&str], most: u64) -> Result<u64, ShapeError> {
        self.size(names, 1, most)?.ok_or_else(|| missing(names))
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<Option<bool>, ShapeError> {
        let Some((key, value)) = self.value(&[name]) else { return Ok(None) };
        match value.as_bool() {
            Some(flag) => Ok(Some(flag)),
            None => Err(wrong(key, value, "true or false")),
        }
    }

    pub(super) fn text(&mut self, names: &[&str]) -> Result<Option<&'a str>, ShapeError> {
        let Some((key, value)) = self.value(names) else { return Ok(None) };
        match value.as_str() {
            Some(text) => Ok(Some(text)),
            None => Err(wrong(key, value, "text in quotes")),
        }
    }

    /// Returns a list of blocks' numbers, each below `layers`.
    pub(super) fn layer_numbers(&mut self, name: &str, layers: u64) -> Result<Option<Vec<u64>>, ShapeError> {
        let Some((key, value)) = self.value(&[name]) else { return Ok(None) };
        let expected = || wrong(key.clone(), value, &format!("a list of numbers from 0 to {}", layers - 1));
        let items = value.as_array().ok_or_else(expected)?;
        let number = |item: &Value| item.as_u64().filter(|&number| number < layers).ok_or_else(expected);
        items.iter().map(number).collect::<Result<_, _>>().map(Some)
    }

    /// Returns a list of one word per block.
    pub(super) fn words(&mut self, names: &[&str]) -> Result<Option<(String, Vec<&'a str>)>, ShapeError> {
        let Some((key, value)) = self.value(names) else { return Ok(None) };
        let words = value.as_array().and_then(|items| items.iter().map(Value::as_str).collect());
        match words {
            Some(words) => Ok(Some((key, words))),
            None => Err(wrong(key, value, "a list of one word for each block")),
        }
    }

    /// Returns the keys that are not used and may change costs.
    pub(super) fn ignored(&self) -> Vec<String> {
        let is_said = |(key, value): &(&String, &Value)| {
            let is_free = self.family.is_free(key) || self.family.keys.is_harmless(key, value, self.object);
            !self.used.contains(*key) && !key.starts_with('_') && !is_free && !is_off(key, value)
        };
        self.object.iter().filter(is_said).map(|(key, _)| key.clone()).collect()
    }
}

/// Returns the error of a missing key, which has one of these names.
pub(super) fn missing(names: &[&str]) -> ShapeError {
    let message = format!("the configuration needs one of the keys {}; add it", names.join(", "));
    ShapeError::new(names, message)
}

/// Returns the error of a value of another kind.
pub(super) fn wrong(key: String, value: &Value, expected: &str) -> ShapeError {
    let value = shortened(value);
    ShapeError::new(&[&key], format!("`{key}` is {value}; use {expected}"))
}

/// Returns the error of a number that contradicts another one.
pub(super) fn contradiction(key: &str, value: u64, expected: String) -> ShapeError {
    ShapeError::new(&[key], format!("`{key}` is {value}; use {expected}"))
}
