//! Reads the configuration and the stages of a model directory.

use std::ops::Range;
use std::path::Path;

use burn::tensor::Device;
use pipewright::bounded_file::{self, SMALL_TEXT};
use pipewright::checkpoint::Checkpoint;
use pipewright::nn::TensorParallel;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::export::Stored;
use super::layout::file_shape;
use super::weights::Weights;
use super::{CONFIG, HfError};
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::parameter::{ParameterSource, ParameterSpec};

/// Reads `dir/config.json` with `parse_model`; an error names the file and, if possible, the line.
///
/// # Errors
/// When the file cannot be read or is not JSON, or when `parse_model` fails.
pub(crate) fn read_config<T>(
    dir: &Path,
    parse_model: impl FnOnce(Value) -> Result<T, ConfigError>,
) -> Result<T, HfError> {
    let path = dir.join(CONFIG);
    let text = read_bytes(&path, SMALL_TEXT)?;
    let json = parse(&path, &named_floats(&text))?;
    parse_model(json).map_err(|source| {
        let line = source.key().and_then(|key| line_of(&text, &key));
        HfError::Config { path, line, source }
    })
}

/// Returns the line of the first mention of a key, counted from 1. A nested key is given as `outer.inner`. If the file
/// spells the inner key in another way, the line is that of the outer one.
fn line_of(json: &[u8], key: &str) -> Option<usize> {
    let text = std::str::from_utf8(json).ok()?;
    let place = key.rsplit('.').find_map(|part| text.find(&format!("\"{part}\"")))?;
    Some(text[..place].matches('\n').count() + 1)
}

/// Builds the stage of `config`'s model that holds `layers`, with the weights in `dir`, on `device`.
///
/// Only the tensors of these layers are read, and converted to `f32` from `F32`, `BF16` or `F16`. Tensors that the
/// model does not know are not read.
///
/// # Errors
/// When a file is missing, cut short or corrupt, when a tensor is missing or has another shape or an unknown element
/// type, or when `layers` is not a range of the model's layers.
pub fn load_stage<F: ModelFamily>(
    dir: &Path,
    config: &F,
    layers: Range<usize>,
    device: &Device,
) -> Result<F::Stage, HfError> {
    load_split_stage(dir, config, layers, device, &TensorParallel::default())
}

/// As [`load_stage`], for a rank that computes the stage together with others: with its slices of the parameters.
///
/// # Errors
/// As [`load_stage`], and when a layer cannot be split over these ranks.
pub fn load_split_stage<F: ModelFamily>(
    dir: &Path,
    config: &F,
    layers: Range<usize>,
    device: &Device,
    tensor: &TensorParallel,
) -> Result<F::Stage, HfError> {
    config.build_split_stage(layers, &mut Weights::open(dir)?, device, tensor)
}

/// Returns the weights of a directory, whose files are opened when they are first needed.
pub(crate) fn open_weights(dir: &Path) -> Result<impl ParameterSource<Error = HfError>, HfError> {
    Weights::open(dir)
}

/// Builds the stage of `config`'s model that holds `layers`, with the parameters of a checkpoint, on `device`.
///
/// # Errors
/// When the checkpoint does not belong to the model, or when `layers` is not a range of the model's layers.
pub fn restore_stage<F: ModelFamily>(
    checkpoint: &Checkpoint,
    config: &F,
    layers: Range<usize>,
    device: &Device,
) -> Result<F::Stage, HfError> {
    config.build_stage(layers, &mut Stored(checkpoint), device)
}

/// Checks that `dir` has weights for the `parameters` of a model. It reads the headers and lengths of the files, but no
/// tensors. Every file that an index names must exist and be complete, whether the model needs it or not.
///
/// # Errors
/// When a file is missing, cut short or not a safetensors file, or when a tensor is missing or has another shape or an
/// unknown element type.
pub fn check_weights(dir: &Path, parameters: &[ParameterSpec]) -> Result<(), HfError> {
    let mut weights = Weights::open(dir)?;
    for name in weights.file_names()? {
        weights.file(name)?;
    }
    for spec in parameters {
        let name = weights.file_of(&spec.path)?.to_owned();
        weights.file(name)?.check(&spec.path, &file_shape(spec))?;
    }
    Ok(())
}

/// Writes bare `Infinity` and `NaN`, which Python puts into files and JSON does not have, as objects with a name, as
/// version 5 of transformers does. Lines stay the same, so that errors name the right one.
fn named_floats(text: &[u8]) -> Vec<u8> {
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
    bounded_file::read_regular(path, limit).map_err(HfError::io("read", path))
}

pub(super) fn parse<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, HfError> {
    serde_json::from_slice(text).map_err(|source| HfError::Json { path: path.to_owned(), source })
}
