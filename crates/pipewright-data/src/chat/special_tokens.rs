//! The special tokens of a tokenizer, such as the one that ends a text, from the files next to it.
//!
//! `tokenizer_config.json` and `special_tokens_map.json` have their texts; `config.json` and
//! `generation_config.json` of a model have the ids of some of them. The first file in this order that names a
//! token counts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use pipewright_gguf::files;
use pipewright_system::bounded_file::{SMALL_TEXT, without_mark};
use serde_json::Value;

use crate::config::DataConfig;
use crate::error::DataError;

/// The name of the token that ends a text.
pub(crate) const END: &str = "eos_token";
/// The files with the texts of special tokens.
const WITH_TEXTS: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];
/// The files with ids of special tokens, and the names of these tokens.
const WITH_IDS: [&str; 2] = ["config.json", "generation_config.json"];
const HAVE_IDS: [&str; 3] = ["bos_token", END, "pad_token"];
/// The largest `tokenizer.json` that is read. For a large vocabulary it has some 30 MB.
pub(crate) const LARGEST_TOKENIZER: u64 = 1 << 29;

/// The special tokens of a tokenizer by the names that templates have for them, such as `bos_token`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    texts: BTreeMap<String, String>,
    /// The `tokenizer.json`; `None` if bytes are tokens.
    tokenizer: Option<PathBuf>,
}

impl SpecialTokens {
    /// Reads the files next to a `tokenizer.json`. Files that do not exist name no token.
    ///
    /// # Errors
    /// When a file cannot be read or is not JSON.
    pub fn beside(tokenizer: &Path) -> Result<Self, DataError> {
        let mut texts = BTreeMap::new();
        // A token that a file names as null does not exist. Every tokenizer can end a text.
        let mut without = BTreeSet::new();
        for name in WITH_TEXTS {
            let Some(file) = read_json(&tokenizer.with_file_name(name), SMALL_TEXT)? else { continue };
            for (name, value) in file.as_object().into_iter().flatten() {
                let text = value.as_str().or_else(|| value["content"].as_str());
                if let Some(text) = text.filter(|_| name.ends_with("_token") && !without.contains(name)) {
                    texts.entry(name.clone()).or_insert_with(|| text.to_owned());
                } else if value.is_null() && name != END && !texts.contains_key(name) {
                    without.insert(name.clone());
                }
            }
        }
        let mut unnamed: Vec<&str> = HAVE_IDS
            .into_iter()
            .filter(|name| !texts.contains_key(*name) && !without.contains(*name))
            .collect();
        for name in WITH_IDS {
            let path = tokenizer.with_file_name(name);
            let Some(file) = (if unnamed.is_empty() { None } else { read_json(&path, SMALL_TEXT)? }) else {
                continue;
            };
            for (name, text) in named_by_id(&file, &unnamed, tokenizer)? {
                texts.insert(name, text);
            }
            unnamed.retain(|name| !texts.contains_key(*name));
        }
        Ok(Self { texts, tokenizer: Some(tokenizer.to_owned()) })
    }

    /// Reads the special tokens of the tokenizer that the settings name.
    pub(crate) fn of(config: &DataConfig) -> Result<Self, DataError> {
        config.tokenizer.file().map_or_else(|| Ok(Self::default()), Self::beside)
    }

    /// Returns the text of a token.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.texts.get(name).map(String::as_str)
    }

    /// Returns the id of a token, if the tokenizer has it.
    ///
    /// # Errors
    /// When the `tokenizer.json` cannot be read or is not JSON.
    pub fn id(&self, name: &str) -> Result<Option<u64>, DataError> {
        let (Some(text), Some(tokenizer)) = (self.text(name), &self.tokenizer) else { return Ok(None) };
        Ok(read_json(tokenizer, LARGEST_TOKENIZER)?.and_then(|file| id_of(&file, text)))
    }

    /// Returns the texts of all tokens.
    pub(crate) fn into_texts(self) -> BTreeMap<String, String> {
        self.texts
    }
}

/// Returns the texts of the tokens whose ids a file of a model has. If it has a list, the first id counts that
/// the tokenizer has.
fn named_by_id(model: &Value, names: &[&str], tokenizer: &Path) -> Result<Vec<(String, String)>, DataError> {
    let ids_of = |name: &str| -> Vec<u64> {
        match &model[format!("{name}_id")] {
            Value::Array(ids) => ids.iter().filter_map(Value::as_u64).collect(),
            id => id.as_u64().into_iter().collect(),
        }
    };
    let named: Vec<(&str, Vec<u64>)> =
        names.iter().map(|name| (*name, ids_of(name))).filter(|(_, ids)| !ids.is_empty()).collect();
    let tokenizer = if named.is_empty() { None } else { read_json(tokenizer, LARGEST_TOKENIZER)? };
    let tokenizer = tokenizer.unwrap_or_default();
    let texts = named.into_iter().filter_map(|(name, ids)| {
        let text = ids.into_iter().find_map(|id| text_of(&tokenizer, id))?;
        Some((name.to_owned(), text))
    });
    Ok(texts.collect())
}

/// Returns the id of a token of a `tokenizer.json`.
fn id_of(tokenizer: &Value, text: &str) -> Option<u64> {
    let mut added = tokenizer["added_tokens"].as_array().into_iter().flatten();
    let added = added.find(|token| token["content"] == text).and_then(|token| token["id"].as_u64());
    added.or_else(|| tokenizer["model"]["vocab"][text].as_u64())
}

/// Returns the text of an id of a `tokenizer.json`.
fn text_of(tokenizer: &Value, id: u64) -> Option<String> {
    let mut added = tokenizer["added_tokens"].as_array().into_iter().flatten();
    let added = added.find(|token| token["id"] == id).and_then(|token| token["content"].as_str());
    let vocabulary = &tokenizer["model"]["vocab"];
    let in_vocabulary = || match vocabulary {
        // A list has pairs of a text and its score.
        Value::Array(texts) => texts.get(usize::try_from(id).ok()?)?[0].as_str(),
        texts => texts.as_object()?.iter().find(|(_, other)| **other == id).map(|(text, _)| text.as_str()),
    };
    added.or_else(in_vocabulary).map(str::to_owned)
}

/// Reads a JSON file; `None` if it does not exist.
pub(crate) fn read_json(path: &Path, limit: u64) -> Result<Option<Value>, DataError> {
    let content = match files::read(path, limit) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        content => content.map_err(|source| DataError::unreadable(path, source))?,
    };
    let json = serde_json::from_slice(without_mark(&content));
    json.map(Some).map_err(|source| DataError::of(path, "not JSON").caused_by(source))
}

/// Completions end with no token, so a model does not learn to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingEnd {
    tokenizer: PathBuf,
    /// The text that should end them, if a file names one.
    end: Option<String>,
}

impl MissingEnd {
    pub(crate) fn new(tokenizer: &Path, end: &str) -> Self {
        Self { tokenizer: tokenizer.to_owned(), end: Some(end.to_owned()).filter(|end| !end.is_empty()) }
    }
}

impl fmt::Display for MissingEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("completions end with no token that says so, and the model does not learn to stop: ")?;
        match &self.end {
            None => f.write_str("no file names an `eos_token`; ")?,
            Some(end) => write!(f, "the `eos_token` {end:?} is not one token of the tokenizer; ")?,
        }
        let folder = self.tokenizer.parent().unwrap_or(Path::new(""));
        write!(f, "name one as `eos_token` in {}", folder.join(WITH_TEXTS[0]).display())
    }
}
