//! Finds the family of a `config.json` or of a name, and makes the configuration of a model of it. A file of
//! a family that is not in the list is an error, which names the nearest family.

use std::path::Path;

use pipewright_shapes::ShapeError;
use pipewright_shapes::key_table::{KeyUse, RefusedKey};
use serde_json::{Map, Value};

use crate::decoder::DecoderConfig;
use crate::error::ModelError;
use crate::hf;
use crate::model_config::{FAMILIES, Listed, ModelConfig};

/// Keys that say the same as others, which have the usual values of a family and must not contradict them.
const REPLACED: [(&str, &str); 5] = [
    ("hybrid_override_pattern", "layers_block_type"),
    ("num_local_experts", "num_experts"),
    ("num_experts", "num_local_experts"),
    ("attention_head_dim", "head_dim"),
    // The width of feed-forward layers follows from this one if it is not written.
    ("n_embd", "n_inner"),
];

impl ModelConfig {
    /// Reads the configuration in a parsed `config.json`. Its `model_type` names the family, or its first
    /// architecture if there is no `model_type`.
    ///
    /// # Errors
    /// When [`ModelConfig::MODEL_TYPES`] does not contain the family, or as
    /// [`ModelFamily::from_json`](crate::ModelFamily::from_json).
    pub fn from_json(json: Value) -> Result<Self, ShapeError> {
        match Listed::in_file(&json) {
            Some(family) => (family.from_json)(json),
            None => {
                let name = name_in_file(&json).unwrap_or_default();
                Err(unknown(name, json.as_object().unwrap_or(&Map::new())))
            }
        }
    }

    /// Returns the configuration with another number of token ids.
    ///
    /// # Errors
    /// When no model has so many.
    pub fn with_vocab_size(&self, size: usize) -> Result<Self, ShapeError> {
        let mut json = self.to_json();
        json["vocab_size"] = size.into();
        Self::from_json(json)
    }

    /// Reads the configuration of a Hugging Face directory, or of a file `config.json`.
    /// [`ModelConfig::unknown_keys`] returns the unknown keys of that file, and
    /// [`ModelConfig::dropout_keys`] those that ask for dropout, which training does not have.
    ///
    /// # Errors
    /// When `config.json` cannot be read, or as [`ModelConfig::from_json`].
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        hf::read_config(dir, |json| {
            let json = with_absent_keys(json);
            Self::from_json(match Listed::in_file(&json) {
                Some(family) => family.keys.without_dropout(json),
                None => json,
            })
        })
    }

    /// Makes the configuration of the family `model_type`, one of [`ModelConfig::MODEL_TYPES`]: `sizes`, the
    /// family's usual values, and in place of them the values of `keys`, which are named as in `config.json`.
    ///
    /// # Errors
    /// When there is no such family, when a key belongs to other families only, or as
    /// [`ModelFamily::from_json`](crate::ModelFamily::from_json).
    pub fn of_sizes(
        model_type: &str,
        mut sizes: DecoderConfig,
        keys: Map<String, Value>,
    ) -> Result<Self, ShapeError> {
        let Some(family) = Listed::find(model_type).filter(|family| family.name() == model_type) else {
            return Err(unknown(model_type, &keys));
        };
        if let Some(key) = keys.keys().find(|key| family.is_foreign(&keys, key)) {
            return Err(foreign(key, model_type));
        }
        // The usual values of some families follow from the width of a head.
        let width = keys.get("head_dim").and_then(Value::as_u64);
        sizes.head_dim = width.and_then(|width| usize::try_from(width).ok()).or(sizes.head_dim);
        let mut json = (family.of_sizes)(sizes);
        if let Some(table) = json.as_object_mut() {
            // `rope_theta` is written next to it, and `keys` may have `rope_scaling`.
            table.remove("rope_parameters");
            let replaced = REPLACED.iter().filter(|(key, _)| keys.contains_key(*key));
            replaced.for_each(|(_, other)| drop(table.remove(*other)));
            let written = family.renamed.iter().filter(|(_, name)| keys.contains_key(*name));
            written.for_each(|(other, _)| drop(table.remove(*other)));
            table.extend(keys);
        }
        (family.from_json)(json)
    }

    /// Returns the name of the family with this `model_type` or class.
    pub fn family_of(name: &str) -> Option<&'static str> {
        Listed::find(name).map(|family| family.name())
    }

    /// Returns whether any family knows a key of `config.json`, even if the key has no effect or is refused.
    pub fn is_known_key(key: &str) -> bool {
        FAMILIES.iter().any(|family| family.keys.use_of(key).is_some())
    }

    /// Returns what a key of `config.json` means for the family `model_type`; `None` if the family does not
    /// know it.
    pub fn key_use(model_type: &str, key: &str) -> Option<KeyUse> {
        FAMILIES.iter().find(|family| family.name() == model_type)?.keys.use_of(key)
    }

    /// Returns the keys of the `config.json` of a directory that no table of keys lists, and whose effect is
    /// unknown. Keys with the names of parts of a computation are refused instead ([`ModelConfig::read`]).
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn unknown_keys(dir: &Path) -> Result<Vec<String>, ModelError> {
        hf::read_config(dir, |json| {
            Ok(Listed::in_file(&json).map_or_else(Vec::new, |family| family.keys.unknown_keys(&json)))
        })
    }

    /// Returns the keys with which the `config.json` of a directory asks for dropout in training, also those
    /// that it leaves out and for which transformers assumes a share above 0. [`ModelConfig::read`] reads such
    /// a file as if they were 0.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn dropout_keys(dir: &Path) -> Result<Vec<String>, ModelError> {
        hf::read_config(dir, |json| {
            let json = with_absent_keys(json);
            Ok(Listed::in_file(&json).map_or_else(Vec::new, |family| family.keys.dropout_keys(&json)))
        })
    }
}

impl Listed {
    /// Returns the family with this `model_type` or class.
    fn find(name: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.name() == name || family.class == name)
    }

    /// Returns the family that a `config.json` names.
    fn in_file(json: &Value) -> Option<&'static Self> {
        name_in_file(json).and_then(Self::find)
    }

    /// Returns whether only other families compute with a key, and its value does not turn it off.
    fn is_foreign(&self, keys: &Map<String, Value>, key: &str) -> bool {
        let table = self.keys;
        let is_of_other_families =
            !table.computes(key) && FAMILIES.iter().any(|other| other.keys.computes(key));
        let is_refused = || table.refused(keys).iter().any(|refused| refused.key == key);
        is_of_other_families && (table.use_of(key).is_none() || is_refused())
    }
}

/// Returns the name of the family in a `config.json`.
fn name_in_file(json: &Value) -> Option<&str> {
    let model_type = json.get("model_type").and_then(Value::as_str);
    model_type.or_else(|| json.get("architectures")?.get(0)?.as_str())
}

/// Adds the keys that a file leaves out, with the values that transformers assumes.
fn with_absent_keys(mut json: Value) -> Value {
    if let (Some(family), Some(keys)) = (Listed::in_file(&json), json.as_object_mut()) {
        for (key, value) in family.absent {
            let mut names = family.renamed.iter().chain([&("rope_scaling", "rope_parameters")]);
            let name = names.find(|(other, _)| other == key).map(|(_, name)| *name);
            if !name.is_some_and(|name| keys.contains_key(name)) {
                keys.entry(*key).or_insert_with(|| (*value).into());
            }
        }
    }
    json
}

/// Returns the error of a key that the family `name` does not have.
fn foreign(key: &str, name: &str) -> ShapeError {
    let families = FAMILIES.iter().filter(|family| family.keys.computes(key));
    let families: Vec<&str> = families.map(|family| family.name()).collect();
    let have = if families.len() == 1 { "has" } else { "have" };
    let message = format!("`{key}` is not a key of `{name}`: only {} {have} it", families.join(", "));
    ShapeError::new(&[key], message)
}

/// The keys that describe what a model takes in addition to text.
const OTHER_INPUTS: [&str; 2] = ["vision_config", "audio_config"];

/// Words in the keys and the names of models with experts, and of models with state spaces.
const PARTS: [&[&str]; 2] = [&["expert", "moe"], &["mamba", "ssm"]];

/// Returns whether a model whose name and keys are `words` has each of [`PARTS`].
fn parts<W: AsRef<str>>(words: impl Iterator<Item = W>) -> [bool; 2] {
    let mut found = [false; 2];
    for word in words {
        for (found, names) in found.iter_mut().zip(PARTS) {
            *found |= names.iter().any(|name| word.as_ref().contains(name));
        }
    }
    found
}

/// Returns the error of a model of an unknown family, whose `config.json` has these keys. The nearest family
/// has the parts of the model and the fewest others; among equals, its name is the most similar.
fn unknown(found: &str, json: &Map<String, Value>) -> ShapeError {
    if found.is_empty() {
        let known = ModelConfig::MODEL_TYPES.join(", ");
        let message = format!(
            "no model family is named: `model_type` (or `architectures`) is missing; the families are {known}"
        );
        return ShapeError::new(&[], message);
    }
    let is_table = |key: &str| json.get(key).is_some_and(Value::is_object);
    let other_inputs = OTHER_INPUTS.into_iter().find(|key| is_table("text_config") && is_table(key));
    if let Some(key) = other_inputs {
        let message = format!(
            "`{found}` is a model of text and other inputs (`{key}`), and only models of text can be run: write its text part \
             as a model of its own, and name that"
        );
        return ShapeError::new(&[key], message);
    }
    let name = found.strip_suffix("ForCausalLM").unwrap_or(found).to_lowercase();
    let wanted = parts(json.keys().cloned().chain([name.clone()]));
    let likeness = |family: &&Listed| {
        let own = parts(family.keys.computed_keys());
        let points = own.iter().zip(&wanted).map(|pair| match pair {
            (true, true) => 3u8,
            (false, false) => 1,
            _ => 0,
        });
        f64::from(points.sum::<u8>()) + strsim::jaro_winkler(&name, family.name())
    };
    let nearest = FAMILIES.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    let refused = nearest.map_or_else(Vec::new, |family| family.keys.refused(json));
    let difference = if refused.is_empty() {
        "which may compute other things even where the keys are the same".to_owned()
    } else {
        let keys = refused.iter().map(|RefusedKey { key, value, .. }| format!("`{key} = {value}`"));
        format!("which cannot compute {}", keys.collect::<Vec<_>>().join(", "))
    };
    let (known, nearest) = (ModelConfig::MODEL_TYPES.join(", "), nearest.map_or("", |family| family.name()));
    let message = format!(
        "model family `{found}` is not supported: the families are {known}; the nearest one is `{nearest}`, {difference}"
    );
    ShapeError::new(&["model_type"], message)
}
