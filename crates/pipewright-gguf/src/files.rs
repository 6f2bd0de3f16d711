//! The files of a model folder. A GGUF file is such a folder too: `model.gguf/config.json`.

use std::io::{self, ErrorKind};
use std::path::Path;

use pipewright_system::bounded_file::read_regular;
use serde_json::Value;

use crate::config::config_json;
use crate::container::{ENDING, Gguf};
use crate::tokenizer::{TOKENS, settings_json, tokenizer_json};

/// The files that a GGUF file has.
const FILES: [&str; 3] = ["config.json", "tokenizer.json", "tokenizer_config.json"];

/// Returns the content of a file, of at most `limit` bytes. The folder may be a GGUF file.
///
/// # Errors
/// When there is no such file, it is larger, the GGUF file cannot be used, or the system reports an error.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let Some(gguf) = gguf_of(path) else { return read_regular(path, limit) };
    let missing = || io::Error::new(ErrorKind::NotFound, "the GGUF file has no such part");
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(missing)?;
    if !FILES.contains(&name) {
        return Err(missing());
    }
    let gguf = Gguf::open(gguf)?;
    let json: Option<Value> = match name {
        // A file may be a tokenizer alone.
        "config.json" if gguf.tensors().next().is_none() => None,
        "config.json" => Some(config_json(&gguf)?),
        "tokenizer.json" => tokenizer_json(&gguf)?,
        _ => settings_json(&gguf)?,
    };
    Ok(json.ok_or_else(missing)?.to_string().into_bytes())
}

/// Returns whether a file exists. The folder may be a GGUF file.
pub fn exists(path: &Path) -> bool {
    let Some(gguf) = gguf_of(path) else { return path.exists() };
    let is_config = path.file_name().is_some_and(|name| name == FILES[0]);
    let is_known = FILES.iter().any(|name| path.file_name().is_some_and(|own| own == *name));
    // A file that cannot be used is reported when it is read.
    is_known && (is_config || Gguf::open(gguf).map_or(true, |gguf| gguf.metadata.contains_key(TOKENS)))
}

/// Returns the GGUF file that has the place of a folder in a path.
fn gguf_of(path: &Path) -> Option<&Path> {
    path.parent()
        .filter(|parent| parent.extension().is_some_and(|ending| ending == ENDING) && parent.is_file())
}
