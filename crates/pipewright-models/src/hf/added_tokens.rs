//! Writes the model of a directory with further tokens: a larger tokenizer, and rows for the new ids in the table of the
//! embedding and in the head.
//!
//! Each new row is the mean of all rows. `resize_token_embeddings` of transformers draws it from a normal distribution
//! with this mean and a billionth of the rows' covariance (John Hewitt, 2021,
//! <https://nlp.stanford.edu/~johnhew/vocab-expansion.html>), which differs from the mean by about 3e-5 of the
//! spread of the rows.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::directory::is_gguf;
use super::json_file::{parse, read_bytes, read_json};
use super::layout::{CONFIG, file_shape, to_file};
use super::origin::{TOKENIZER, copy_files};
use super::rewritten::rewrite;
use super::weight_type::WeightType;
use super::weights::Weights;
use super::write::{Scratch, require_vacant};
use crate::error::ModelError;
use crate::family::ModelFamily;
use crate::parameter::{ParameterSource, ParameterSpec};
use crate::vocabulary::HEAD;

/// The largest `tokenizer.json` that is read, in bytes.
const LARGEST: u64 = 1 << 29;
/// The file of transformers with further facts about a tokenizer.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The list of a tokenizer's tokens that are not in its vocabulary.
const ADDED: &str = "added_tokens";
/// The same in the configuration of transformers.
const DECODER: &str = "added_tokens_decoder";

/// The additions to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddedTokens {
    /// The id of the first new token. The others follow it.
    pub first: usize,
    /// The number of new rows of the table. A model may have rows without tokens, which new tokens take.
    pub rows: usize,
    /// The size of the vocabulary with the new rows.
    pub vocab_size: usize,
}

/// Writes the model in `from` with further `tokens` into `dir`, which must not exist or must be empty. If they are
/// `special`, texts of generated tokens leave them out.
///
/// # Errors
/// When there is no `tokenizer.json`, when a token is one of the tokenizer already or is named twice, when a file of the
/// model is missing or damaged, or when the system reports an error.
pub fn add_tokens(
    from: &Path,
    config: &dyn ModelFamily,
    tokens: &[String],
    special: bool,
    dir: &Path,
) -> Result<AddedTokens, ModelError> {
    let target = std::path::absolute(dir).map_err(ModelError::io("resolve", dir))?;
    require_vacant(&target)?;
    let mut weights = Weights::open(from)?;
    let from = weights.directory().to_owned();
    if is_gguf(&from) {
        return Err(ModelError::at(
            &from,
            "tokens are not added to a GGUF file: name the model as safetensors",
        ));
    }
    let mut tokenizer = TokenizerFile::read(&from)?;
    let first = tokenizer.size();
    let entries = tokenizer.add(tokens, special)?;
    let head = config.head();
    let rows = (first + tokens.len()).saturating_sub(head.vocabulary);
    let added = AddedTokens { first, rows, vocab_size: head.vocabulary + rows };
    let scratch = &mut Scratch::create(&target)?;
    let table = head.names.of(&format!("{}.weight", head.embedding));
    let is_of_rows = |spec: &&ParameterSpec| {
        let module = spec.path.rsplit_once('.').map_or("", |(module, _)| module);
        spec.path == table || module == HEAD
    };
    let specs = config.outline(0..config.layers(), &Default::default())?;
    let mut grown: Vec<(String, ParameterSpec)> = Vec::new();
    for spec in specs.iter().filter(is_of_rows) {
        let (place, _) = weights.find(spec)?;
        grown.push((place.tensor, spec.clone()));
    }
    let spec_of = |tensor: &str| grown.iter().find(|(name, _)| name == tensor).map(|(_, spec)| spec);
    rewrite(
        &mut weights,
        scratch,
        |(tensor, dtype, shape, bytes)| {
            spec_of(tensor)?;
            let mut larger = shape.clone();
            *larger.first_mut()? += rows;
            let row = bytes / shape[0].max(1);
            Some(vec![(tensor.clone(), *dtype, larger, bytes + rows * row)])
        },
        |weights, tensor| {
            let Some(spec) = spec_of(tensor) else { return Ok(None) };
            let (dtype, ..) = weights.describe(tensor)?;
            let mean = mean_row(&to_file(spec, &weights.parameter(spec)?), file_shape(spec)[0]);
            let encoded = WeightType::of_dtype(dtype).and_then(|kind| kind.encode(&mean));
            let Some(row) = encoded else {
                let fault = "is quantised: add the tokens to the model from which it was made";
                return Err(ModelError::at(weights.directory(), format!("tensor `{tensor}` {fault}")));
            };
            Ok(Some(vec![weights.raw(tensor)?, row.repeat(rows)]))
        },
    )?;
    copy_files(&from, scratch.path())?;
    let mut json: Value = read_json(&from.join(CONFIG))?;
    json["vocab_size"] = added.vocab_size.into();
    scratch.write_json(CONFIG, &json)?;
    scratch.write_json(TOKENIZER, &Value::Object(tokenizer.0))?;
    let path = from.join(TOKENIZER_CONFIG);
    if path.is_file() {
        let mut json: Value = read_json(&path)?;
        if let Some(decoder) = json.get_mut(DECODER).and_then(Value::as_object_mut) {
            for mut entry in entries {
                let id = entry.remove("id").unwrap_or_default().to_string();
                decoder.insert(id, Value::Object(entry));
            }
        }
        scratch.write_json(TOKENIZER_CONFIG, &json)?;
    }
    require_vacant(&target)?;
    scratch.rename_to(&target)?;
    Ok(added)
}

/// Returns the mean of rows that follow each other.
fn mean_row(elements: &[f32], rows: usize) -> Vec<f32> {
    let width = elements.len() / rows.max(1);
    let mut sums = vec![0.0; width];
    for row in elements.chunks_exact(width.max(1)) {
        sums.iter_mut().zip(row).for_each(|(sum, element)| *sum += f64::from(*element));
    }
    sums.into_iter().map(|sum| (sum / rows as f64) as f32).collect()
}

/// The content of a `tokenizer.json`.
struct TokenizerFile(Map<String, Value>);

impl TokenizerFile {
    fn read(from: &Path) -> Result<Self, ModelError> {
        let path = from.join(TOKENIZER);
        if !path.is_file() {
            let fault = "there is no tokenizer.json, which new tokens need: write it with `save_pretrained` of transformers";
            return Err(ModelError::at(from, fault));
        }
        parse(&path, &read_bytes(&path, LARGEST)?).map(Self)
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
    fn size(&self) -> usize {
        let vocabulary = self.0.get("model").map(|model| &model["vocab"]);
        let largest =
            vocabulary.and_then(Value::as_object).into_iter().flatten().filter_map(|(_, id)| id.as_u64());
        let pieces = vocabulary.and_then(Value::as_array).map_or(0, Vec::len);
        let ids = largest.chain(self.added().map(|(_, id)| id));
        ids.map(|id| id as usize + 1).max().unwrap_or(0).max(pieces)
    }

    /// Adds tokens with the next ids, and returns their entries.
    fn add(&mut self, tokens: &[String], special: bool) -> Result<Vec<Map<String, Value>>, ModelError> {
        let mut entries = Vec::new();
        for token in tokens {
            if let Some(id) = self.id_of(token) {
                let fault =
                    format!("`{token}` is a token of the model already, with the id {id}: leave it out");
                return Err(ModelError::new(fault));
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_row_is_the_mean_of_all() {
        assert_eq!(mean_row(&[1.0, 2.0, 3.0, 6.0], 2), [2.0, 4.0]);
    }

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
