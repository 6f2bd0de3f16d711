//! A model of a directory with further tokens: a larger tokenizer, and rows for the new ids in the table of the
//! embedding and in the head. [`add_tokens`] writes it. A run with `model.add_tokens` trains it from the directory as it is:
//! [`Weights`] adds the rows that [`added_rows`] counts.
//!
//! Each new row is the mean of all rows. `resize_token_embeddings` of transformers draws it from a normal distribution
//! with this mean and a billionth of the rows' covariance (John Hewitt, 2021,
//! <https://nlp.stanford.edu/~johnhew/vocab-expansion.html>), which differs from the mean by about 3e-5 of the
//! spread of the rows.

use std::path::Path;

use pipewright::bounded_file::write_regular;
use pipewright::train::data::{DataError, TokenizerFile};
use pipewright_schedule::error_text::with_causes;
use serde_json::Value;

use super::directory::is_gguf;
use super::json_file::read_json;
use super::layout::{CONFIG, file_shape, to_file};
use super::origin::{TOKENIZER, copy_files};
use super::rewritten::rewrite;
use super::vocabulary_rows::{is_of_vocabulary, mean_row};
use super::weight_type::WeightType;
use super::weights::Weights;
use super::write::{Scratch, require_vacant};
use crate::error::ModelError;
use crate::family::ModelFamily;
use crate::lora::module_of;
use crate::parameter::{ParameterSource, ParameterSpec};

/// The file of transformers with further facts about a tokenizer.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The list in it of tokens by id.
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
/// When there is no `tokenizer.json`, when the tokenizer has a token already or a token is named twice, when a file of the
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
    let added = added_rows(&from, config, &from.join(TOKENIZER), tokens)?;
    let rows = added.rows;
    let scratch = &mut Scratch::create(&target)?;
    let mut grown: Vec<(String, ParameterSpec)> = Vec::new();
    for spec in vocabulary_of(config)? {
        let (place, _) = weights.find(&spec)?;
        grown.push((place.tensor, spec));
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
            let Some(row) = encoded else { return Err(quantised(weights.directory(), tensor)) };
            Ok(Some(vec![weights.raw(tensor)?, row.repeat(rows)]))
        },
    )?;
    copy_files(&from, scratch.path())?;
    let mut json: Value = read_json(&from.join(CONFIG))?;
    json["vocab_size"] = added.vocab_size.into();
    scratch.write_json(CONFIG, &json)?;
    extend_tokenizer(scratch.path(), tokens, special)?;
    require_vacant(&target)?;
    scratch.rename_to(&target)?;
    Ok(added)
}

/// Returns what `tokens` add to the model in `from`, whose tokenizer is this file.
///
/// # Errors
/// Fails if a file is missing, the tokenizer already has one of the tokens, a token is named twice, or the table or the head is
/// quantised or in a GGUF file.
pub fn added_rows(
    from: &Path,
    config: &dyn ModelFamily,
    tokenizer: &Path,
    tokens: &[String],
) -> Result<AddedTokens, ModelError> {
    let weights = Weights::open(from)?;
    if is_gguf(weights.directory()) {
        let fault = "tokens are not added to a GGUF file: name the model as safetensors";
        return Err(ModelError::at(weights.directory(), fault));
    }
    // The rows that the files have are counted by this key, and its absence has another meaning in each family.
    let config_file = weights.directory().join(CONFIG);
    let json: Value = read_json(&config_file)?;
    if json["vocab_size"].as_u64() != Some(config.vocab_size() as u64) {
        let fault = format!(
            "new tokens change `vocab_size`, which is {} here: write `\"vocab_size\": {}`, or the number of rows of the \
             embedding, at the top of the file",
            json["vocab_size"],
            config.vocab_size()
        );
        return Err(ModelError::at(&config_file, fault));
    }
    if let Some(place) = vocabulary_of(config)?.iter().find_map(|spec| weights.quantised_place(spec)) {
        return Err(quantised(weights.directory(), &place.tensor));
    }
    let mut tokenizer = read_tokenizer(tokenizer)?;
    let first = tokenizer.size();
    tokenizer.add(tokens, true).map_err(refused)?;
    let vocabulary = config.vocab_size();
    let rows = (first + tokens.len()).saturating_sub(vocabulary);
    Ok(AddedTokens { first, rows, vocab_size: vocabulary + rows })
}

/// Adds tokens to the `tokenizer.json` in a folder, and to the `tokenizer_config.json` next to it.
///
/// # Errors
/// When a file cannot be read or written, or a token is one of the tokenizer already.
pub fn extend_tokenizer(folder: &Path, tokens: &[String], special: bool) -> Result<(), ModelError> {
    let path = folder.join(TOKENIZER);
    let mut tokenizer = read_tokenizer(&path)?;
    let entries = tokenizer.add(tokens, special).map_err(refused)?;
    write(&path, &tokenizer.to_text())?;
    let path = folder.join(TOKENIZER_CONFIG);
    if !path.is_file() {
        return Ok(());
    }
    let mut json: Value = read_json(&path)?;
    if let Some(decoder) = json.get_mut(DECODER).and_then(Value::as_object_mut) {
        for mut entry in entries {
            let id = entry.remove("id").unwrap_or_default().to_string();
            decoder.insert(id, Value::Object(entry));
        }
    }
    write(&path, &format!("{json:#}\n"))
}

fn write(path: &Path, text: &str) -> Result<(), ModelError> {
    write_regular(path, text.as_bytes()).map_err(ModelError::io("write", path))
}

fn read_tokenizer(path: &Path) -> Result<TokenizerFile, ModelError> {
    if !path.is_file() {
        let fault = "there is no tokenizer.json, which new tokens need: write it with `save_pretrained` of transformers";
        return Err(ModelError::at(path.parent().unwrap_or(path), fault));
    }
    TokenizerFile::read(path).map_err(refused)
}

/// Returns the error of a tokenizer.
fn refused(error: DataError) -> ModelError {
    ModelError::new(with_causes(&error))
}

/// Returns the error of rows that are quantised.
fn quantised(dir: &Path, tensor: &str) -> ModelError {
    let fault = "is quantised: add the tokens to the model from which it was made";
    ModelError::at(dir, format!("tensor `{tensor}` {fault}"))
}

/// Returns the paths of the modules among `parameters` that have a row for each token id.
pub fn vocabulary_modules(parameters: &[ParameterSpec]) -> Vec<String> {
    parameters
        .iter()
        .filter(|spec| is_of_vocabulary(spec))
        .map(|spec| module_of(&spec.path).to_owned())
        .collect()
}

/// Returns the parameters of a model that have a row for each token id.
fn vocabulary_of(config: &dyn ModelFamily) -> Result<Vec<ParameterSpec>, ModelError> {
    let specs = config.outline(0..config.layers(), &Default::default())?;
    Ok(specs.into_iter().filter(is_of_vocabulary).collect())
}
