//! Reads the JSON files of a model directory, as Python writes them.

use std::path::Path;

use super::directory::is_gguf;
use crate::error::ModelError;
use pipewright::bounded_file::{self, LFS_POINTER, SMALL_TEXT};
use pipewright_gguf::files;
use serde::de::DeserializeOwned;

/// Writes bare `Infinity` and `NaN`, which Python puts into files and JSON does not have, as objects with a
/// name, as version 5 of transformers does. Lines stay the same, so that errors name the right one.
pub(super) fn named_floats(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let (mut in_text, mut rest) = (false, text);
    while let Some((&byte, after)) = rest.split_first() {
        let name = [&b"-Infinity"[..], b"Infinity", b"NaN"].into_iter().find(|name| rest.starts_with(name));
        match name.filter(|_| !in_text) {
            Some(name) => {
                out.extend_from_slice(b"{\"__float__\": \"");
                out.extend_from_slice(name);
                out.extend_from_slice(b"\"}");
                rest = &rest[name.len()..];
            }
            None if in_text && byte == b'\\' => {
                let (pair, after) = rest.split_at(rest.len().min(2));
                out.extend_from_slice(pair);
                rest = after;
            }
            None => {
                in_text ^= byte == b'"';
                out.push(byte);
                rest = after;
            }
        }
    }
    out
}

/// Reads and parses a small JSON file.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    parse(path, &named_floats(&read_bytes(path, SMALL_TEXT)?))
}

pub(super) fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, ModelError> {
    let bytes = files::read(path, limit).map_err(|source| match path.parent() {
        // The path of a file in a GGUF file is none that the user has named.
        Some(gguf) if is_gguf(gguf) => ModelError::at(gguf, source),
        _ => ModelError::io("read", path)(source),
    })?;
    if bytes.starts_with(LFS_POINTER) {
        return Err(lfs_pointer(path));
    }
    Ok(bytes)
}

pub(super) fn parse<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, ModelError> {
    // Some editors write a byte-order mark, which is not JSON.
    serde_json::from_slice(bounded_file::without_mark(text))
        .map_err(|source| ModelError::at(path, "cannot be parsed").because(source))
}

/// Returns the error of a small text file that is the pointer to a file that Git LFS has not downloaded.
pub(super) fn lfs_pointer(path: &Path) -> ModelError {
    let fault = "this is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file";
    ModelError::at(path, fault)
}
