//! [`TokenizerFile`]: the content of a `tokenizer.json`, to which tokens can be added.

use std::path::Path;

use pipewright_system::bounded_file::without_mark;
use serde_json::{Map, Value, json};

use crate::chat::special_tokens::LARGEST_TOKENIZER;
use crate::content::refuse_lfs_pointer;
use crate::error::DataError;

/// The list of a tokenizer's tokens that are not in its vocabulary.
const ADDED: &str = "added_tokens";

/// The content of a `tokenizer.json`.
#[derive(Clone, Debug)]
pub struct TokenizerFile(Map<String, Value>);

impl TokenizerFile {
    /// Reads a file.
    ///
    /// # Errors
    /// When the file cannot be read or is not JSON.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        Self::of(path, &read(path)?)
    }

    /// Parses the content of the file `path`.
    pub(crate) fn of(path: &Path, content: &[u8]) -> Result<Self, DataError> {
        refuse_other_forms(path)?;
        refuse_lfs_pointer(path, content)?;
        let parsed = serde_json::from_slice(without_mark(content));
        parsed.map(Self).map_err(|source| DataError::of(path, "cannot be parsed").caused_by(source))
    }

    /// Returns the tokens that are not in the vocabulary.
    fn added(&self) -> impl Iterator<Item = (&str, u64)> {
        let entries = self.0.get(ADDED).and_then(Value::as_array).into_iter().flatten();
        entries.filter_map(|entry| Some((entry["content"].as_str()?, entry["id"].as_u64()?)))
    }

    /// Returns the id of a token.
    fn id_of(&self, token: &str) -> Option<u64> {
        let vocabulary = &self.0.get("model")?["vocab"];
        let pieces = || vocabulary.as_array()?.iter().position(|piece| piece[0] == token).map(|id| id as u64);
        let added = || self.added().find(|(content, _)| *content == token).map(|(_, id)| id);
        vocabulary.get(token).and_then(Value::as_u64).or_else(pieces).or_else(added)
    }

    /// Returns the first id above all others.
    pub fn size(&self) -> usize {
        let vocabulary = self.0.get("model").map(|model| &model["vocab"]);
        let largest =
            vocabulary.and_then(Value::as_object).into_iter().flatten().filter_map(|(_, id)| id.as_u64());
        let pieces = vocabulary.and_then(Value::as_array).map_or(0, Vec::len);
        let ids = largest.chain(self.added().map(|(_, id)| id));
        ids.map(|id| id as usize + 1).max().unwrap_or(0).max(pieces)
    }

    /// Adds tokens with the next ids, and returns their entries. If they are `special`, texts of generated tokens leave
    /// them out.
    ///
    /// # Errors
    /// When a token is one of the tokenizer already.
    pub fn add(&mut self, tokens: &[String], special: bool) -> Result<Vec<Map<String, Value>>, DataError> {
        let mut entries = Vec::new();
        for token in tokens {
            if let Some(id) = self.id_of(token) {
                let fault =
                    format!("`{token}` is a token of the model already, with the id {id}: leave it out");
                return Err(DataError::new(fault));
            }
            let entry = json!({
                "id": self.size(), "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": !special, "special": special,
            });
            let added = self.0.entry(ADDED).or_insert_with(|| json!([]));
            if added.is_null() {
                *added = json!([]);
            }
            if let (Some(list), Value::Object(entry)) = (added.as_array_mut(), entry) {
                list.push(Value::Object(entry.clone()));
                entries.push(entry);
            }
        }
        Ok(entries)
    }

    /// Returns the content as text.
    pub fn to_text(&self) -> String {
        let json = Value::Object(self.0.clone());
        format!("{json:#}\n")
    }
}

/// Refuses a file with a tokenizer in a form that is not read.
pub(crate) fn refuse_other_forms(path: &Path) -> Result<(), DataError> {
    /// Forms that are JSON too.
    const OTHERS: [&str; 2] = ["tekken.json", "vocab.json"];
    let is_json = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
    if is_json && !OTHERS.iter().any(|other| path.ends_with(other)) {
        return Ok(());
    }
    Err(DataError::of(
        path,
        "the tokenizer is in a form that is not read; write a `tokenizer.json` \
         (`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of transformers), or `tokenizer = \"bytes\"` in [data]",
    ))
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, DataError> {
    pipewright_gguf::files::read(path, LARGEST_TOKENIZER)
        .map_err(|source| DataError::unreadable(path, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds two tokens to a tokenizer with this vocabulary and added tokens.
    fn check(vocabulary: Value, added: Value, first: u64) {
        let json = json!({ "model": { "vocab": vocabulary }, ADDED: added });
        let Value::Object(json) = json else { unreachable!("it is an object") };
        let mut file = TokenizerFile(json);
        assert_eq!(file.size() as u64, first);
        let tokens = ["<a>", "<b>"].map(str::to_owned);
        file.add(&tokens, true).expect("they are new");
        assert_eq!([file.id_of("<a>"), file.id_of("<b>")], [Some(first), Some(first + 1)]);
        let error = file.add(&tokens[1..], true).expect_err("it is there").to_string();
        assert!(
            error.contains(&format!("`<b>` is a token of the model already, with the id {}", first + 1)),
            "{error}"
        );
    }

    #[test]
    fn new_tokens_have_the_next_ids() {
        check(json!({ "x": 0, "y": 1 }), json!([]), 2);
        check(json!({ "x": 0, "y": 1 }), json!([{ "id": 5, "content": "z" }]), 6);
        check(json!([["x", 0.0], ["y", -1.5]]), Value::Null, 2);
    }
}
