//! The keys of a `config.json`, and which of them are used.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::error::ShapeError;
use crate::family::Family;
pub(super) use crate::key_range::MAX_BLOCKS;
use crate::key_table::{is_dropout, is_off};

/// The largest size of a part. Published models have at most some ten thousand.
pub(super) const MAX_SIZE: u64 = 1 << 20;
/// The largest vocabulary.
pub(super) const MAX_VOCABULARY: u64 = 1 << 28;

/// The keys of a configuration, and which of them are used.
pub(super) struct Keys<'a> {
    object: &'a Map<String, Value>,
    family: Family,
    /// The number of blocks, once it is known.
    blocks: Option<u64>,
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
        Self {
            object,
            family: Family::unknown(),
            blocks: None,
            used: BTreeSet::new(),
            filled: BTreeSet::new(),
        }
    }

    /// Returns all keys.
    pub(super) fn object(&self) -> &'a Map<String, Value> {
        self.object
    }

    /// Sets the values that a family has for keys that the file leaves out.
    pub(super) fn set_family(&mut self, family: &Family) {
        self.family = *family;
    }

    /// Sets the number of blocks, which lists with an entry for each block must have.
    pub(super) fn set_blocks(&mut self, blocks: u64) {
        self.blocks = Some(blocks);
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
        !self.family.foreign.contains(&name) && self.given(name).is_some()
    }

    /// Returns the value of a key, or of `table.key`, that is given and not null.
    fn given(&self, name: &str) -> Option<&'a Value> {
        let value = match name.split_once('.') {
            Some((table, name)) => self.object.get(table)?.get(name),
            None => self.object.get(name),
        };
        value.filter(|value| !value.is_null())
    }

    /// Marks a key as used.
    pub(super) fn mark(&mut self, names: &[&str]) {
        self.used.extend(names.iter().map(|&name| name.to_owned()));
    }

    /// Returns the first of these keys that is given and not null.
    pub(super) fn value(&mut self, names: &[&str]) -> Option<(String, &'a Value)> {
        self.mark(names);
        let name = names.iter().find(|&&name| self.has(name))?;
        Some(((*name).to_owned(), self.given(name)?))
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
        // Some files have a list with the size of each block.
        let same =
            |items: &'a Vec<Value>| items.first().filter(|first| items.iter().all(|item| item == *first));
        let value = match value.as_array() {
            Some(items) => {
                self.check_length(&key, items.len())?;
                same(items).unwrap_or(value)
            }
            None => value,
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

    /// Returns a share, which is from 0 to 1.
    pub(super) fn share(&mut self, names: &[&str]) -> Result<Option<f64>, ShapeError> {
        let Some((key, value)) = self.value(names) else { return Ok(None) };
        match value.as_f64().filter(|share| (0.0..=1.0).contains(share)) {
            Some(share) => Ok(Some(share)),
            None => Err(wrong(key, value, "a number from 0 to 1")),
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

    /// Returns a list of one word per block.
    pub(super) fn words_of_blocks(
        &mut self,
        name: &str,
    ) -> Result<Option<(String, Vec<&'a str>)>, ShapeError> {
        let words = self.words(&[name])?;
        words.as_ref().map_or(Ok(()), |(key, words)| self.check_length(key, words.len()))?;
        Ok(words)
    }

    /// Returns a list of 0 or 1 for each block.
    pub(super) fn flags_of_blocks(&mut self, name: &str) -> Result<Option<Vec<u64>>, ShapeError> {
        let flags = self.layer_numbers(name, 2)?;
        flags.as_ref().map_or(Ok(()), |flags| self.check_length(name, flags.len()))?;
        Ok(flags)
    }

    /// Returns an error if a list is too short to have an entry for each block. Further entries belong to predictors.
    fn check_length(&self, key: &str, entries: usize) -> Result<(), ShapeError> {
        let Some(blocks) = self.blocks.filter(|&blocks| (entries as u64) < blocks) else { return Ok(()) };
        let message =
            format!("`{key}` is a list of length {entries}; use one entry for each of the {blocks} blocks");
        Err(ShapeError::new(&[key], message))
    }

    /// Returns the first key whose value turns off a part that all models of the family have, with its value and the
    /// values that it may have.
    pub(super) fn turned_off(&self) -> Option<(&'a str, &'a Value, String)> {
        self.object.iter().find_map(|(key, value)| {
            let is_read = self.used.contains(key) || self.family.is_free(key);
            let expected = self.family.keys.instead_of_off(key, value, self.object, is_read)?;
            Some((key.as_str(), value, expected))
        })
    }

    /// Returns the keys that no table knows, and whose values may turn something on. The keys of the table of linear
    /// attention have its name in front.
    pub(super) fn unknown(&self) -> Vec<String> {
        let nested = self.object.get(LINEAR).and_then(Value::as_object).into_iter().flatten();
        let nested = nested.map(|(key, value)| (format!("{LINEAR}.{key}"), value));
        let own = self.object.iter().map(|(key, value)| (key.clone(), value));
        let is_unknown = |(key, value): &(String, &Value)| {
            let is_free = self.family.is_free(key) || self.family.keys.is_harmless(key, value, self.object);
            let is_said = is_dropout(key) || LEFT_OUT.contains(&key.as_str()) || key == LINEAR;
            !self.used.contains(key) && !key.starts_with('_') && !is_free && !is_said && !is_off(key, value)
        };
        own.chain(nested).filter(is_unknown).map(|(key, _)| key).collect()
    }

    /// Returns sentences about dropout, which training here does not have either, and about other parts of the model
    /// than its decoder.
    pub(super) fn left_out(&self, outside: Option<&Map<String, Value>>) -> Vec<String> {
        let drops = |(key, value): &(&String, &Value)| {
            let is_share = value.as_f64().is_some_and(|share| share > 0.0);
            is_share && is_dropout(key) && !self.family.is_free(key)
        };
        let dropout = self.object.iter().filter(drops);
        let dropout =
            dropout.map(|(key, value)| format!("`{key}` is {value}: it counts as 0, as in training"));
        let objects = [Some(self.object), outside].into_iter().flatten();
        let others = objects.flat_map(|object| LEFT_OUT.into_iter().filter(|key| object.contains_key(*key)));
        dropout.chain(others.map(|key| format!("`{key}` is left out: only the decoder counts"))).collect()
    }
}

/// The table of the sizes of linear attention in files of Kimi.
const LINEAR: &str = "linear_attn_config";
/// The keys of other parts of a model than its decoder.
const LEFT_OUT: [&str; 3] = ["vision_config", "audio_config", "speech_config"];

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
