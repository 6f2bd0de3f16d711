//! The files of a model's original directory that belong to the model but not to its training: the tokenizer, the
//! settings of generation, and the keys of `config.json` that do not affect the results.
//!
//! [`keep_origin`] copies them when a run starts, because the original directory may be gone when the run's model is
//! exported; [`super::export`] puts them into the exported directory.

use std::fs;
use std::path::Path;

use pipewright::bounded_file::{refuse_special, require_regular};
use serde_json::Value;

use super::read::read_json;
use super::{CONFIG, HfError};

/// The file name of a tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

/// The settings of generation.
const GENERATION: &str = "generation_config.json";

/// The files that are copied unchanged if the directory has them.
const COPIED: [&str; 11] = [
    GENERATION,
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// Keys of `config.json` that would be wrong with other weights: the element type under its old name, the compression
/// of the original weights, code of the original directory, and that directory's name.
const DROPPED: [&str; 5] =
    ["torch_dtype", "quantization_config", "compression_config", "auto_map", "_name_or_path"];

/// Copies the files that an export needs from the model directory `from` into the folder `to`, which is created.
///
/// # Errors
/// When the system reports an error.
pub fn keep_origin(from: &Path, to: &Path) -> Result<(), HfError> {
    fs::create_dir_all(to).map_err(HfError::io("create", to))?;
    copy(from, to, CONFIG)?;
    copy_files(from, to)
}

/// Returns the tokens that end a text, which `generation_config.json` and `config.json` name as `eos_token_id`: one or a
/// list. Files that do not exist name none.
///
/// # Errors
/// When a file cannot be read or is not JSON.
pub fn end_tokens(dir: &Path) -> Result<Vec<u32>, HfError> {
    let mut ends = Vec::new();
    for path in [GENERATION, CONFIG].map(|name| dir.join(name)).into_iter().filter(|path| path.is_file()) {
        let settings: Value = read_json(&path)?;
        let ids = match &settings["eos_token_id"] {
            Value::Array(ids) => ids.clone(),
            id => vec![id.clone()],
        };
        ends.extend(ids.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

/// Copies the files that are kept unchanged.
pub(super) fn copy_files(from: &Path, to: &Path) -> Result<(), HfError> {
    COPIED.iter().try_for_each(|name| copy(from, to, name))
}

/// Copies a file if it exists.
fn copy(from: &Path, to: &Path, name: &str) -> Result<(), HfError> {
    let (source, target) = (from.join(name), to.join(name));
    match require_regular(&source) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        result => result.map_err(HfError::io("read", &source))?,
    };
    refuse_special(&target).map_err(HfError::io("write", &target))?;
    fs::copy(&source, &target).map(drop).map_err(HfError::io("copy", &source))
}

/// Returns `ours`, with the keys of the `config.json` in `origin` that `ours` does not have.
pub(super) fn with_original_keys(mut ours: Value, origin: &Path) -> Result<Value, HfError> {
    let path = origin.join(CONFIG);
    if !path.exists() {
        return Ok(ours);
    }
    let original: serde_json::Map<String, Value> = read_json(&path)?;
    if let Some(keys) = ours.as_object_mut() {
        for (key, value) in original {
            if !DROPPED.contains(&key.as_str()) {
                keys.entry(key).or_insert(value);
            }
        }
    }
    Ok(ours)
}
