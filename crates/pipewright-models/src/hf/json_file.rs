//! Reads the JSON files of a model directory, as Python writes them.

use std::path::Path;

use pipewright::bounded_file::{self, LFS_POINTER, SMALL_TEXT};
use serde::de::DeserializeOwned;

use super::error::HfError;

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
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, HfError> {
    parse(path, &named_floats(&read_bytes(path, SMALL_TEXT)?))
}

pub(super) fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, HfError> {
    let bytes = bounded_file::read_regular(path, limit).map_err(HfError::io("read", path))?;
    if bytes.starts_with(LFS_POINTER) {
        return Err(HfError::LfsPointer { path: path.to_owned() });
    }
    Ok(bytes)
}

pub(super) fn parse<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, HfError> {
    // Some editors write a byte-order mark, which is not JSON.
    serde_json::from_slice(bounded_file::without_mark(text))
        .map_err(|source| HfError::Json { path: path.to_owned(), source })
}
