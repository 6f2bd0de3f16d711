//! Reads the configuration and the stages of a model directory.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use pipewright::bounded_file::{self, SMALL_TEXT};
use pipewright::checkpoint::Checkpoint;
use pipewright::nn::TensorParallel;
use pipewright::tensor::Slice;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::export::Stored;
use super::file::SafetensorsFile;
use super::layout::{file_dimension, file_shape, from_file};
use super::{CONFIG, HfError, INDEX, SINGLE};
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

/// The largest index that is read. An index has about a hundred bytes for each tensor.
const LARGEST_INDEX: u64 = 1 << 28;

/// The weights of a directory. Files are opened when they are first needed.
struct Weights {
    dir: PathBuf,
    files: WeightFiles,
    open: HashMap<String, SafetensorsFile>,
}

/// The file of each tensor.
enum WeightFiles {
    Single,
    Indexed(BTreeMap<String, String>),
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    fn open(dir: &Path) -> Result<Self, HfError> {
        let index = dir.join(INDEX);
        let files = if dir.join(SINGLE).is_file() {
            WeightFiles::Single
        } else if index.is_file() {
            WeightFiles::Indexed(parse::<Index>(&index, &read_bytes(&index, LARGEST_INDEX)?)?.weight_map)
        } else {
            return Err(HfError::NoWeights { dir: dir.to_owned() });
        };
        Ok(Self { dir: dir.to_owned(), files, open: HashMap::new() })
    }

    fn file_of(&self, tensor: &str) -> Result<&str, HfError> {
        let WeightFiles::Indexed(map) = &self.files else { return Ok(SINGLE) };
        let missing = || HfError::MissingTensor { path: self.dir.join(INDEX), tensor: tensor.to_owned() };
        let file = map.get(tensor).ok_or_else(missing)?;
        self.require_plain_name(tensor, file)?;
        Ok(file)
    }

    /// Returns the names of all files with weights.
    fn file_names(&self) -> Result<BTreeSet<String>, HfError> {
        let WeightFiles::Indexed(map) = &self.files else { return Ok(BTreeSet::from([SINGLE.to_owned()])) };
        map.iter().try_for_each(|(tensor, file)| self.require_plain_name(tensor, file))?;
        Ok(map.values().cloned().collect())
    }

    /// Returns an error if a name leads out of the directory.
    fn require_plain_name(&self, tensor: &str, file: &str) -> Result<(), HfError> {
        if Path::new(file).file_name() == Some(file.as_ref()) {
            return Ok(());
        }
        let (path, tensor, file) = (self.dir.join(INDEX), tensor.to_owned(), file.to_owned());
        Err(HfError::IndexFile { path, tensor, file })
    }

    /// Opens the file of this name, unless it is open already.
    fn file(&mut self, name: String) -> Result<&mut SafetensorsFile, HfError> {
        let path = self.dir.join(&name);
        match self.open.entry(name) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => Ok(entry.insert(SafetensorsFile::open(path)?)),
        }
    }
}

impl ParameterSource for Weights {
    type Error = HfError;

    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, HfError> {
        let name = self.file_of(&spec.path)?.to_owned();
        let values = self.file(name)?.read(&spec.path, &file_shape(spec))?;
        Ok(from_file(spec, values))
    }

    /// Reads no more of the file than the slice if its elements follow each other there.
    fn slice_of(&mut self, spec: &ParameterSpec, slice: Slice) -> Result<Vec<f32>, HfError> {
        let shape = file_shape(spec);
        if file_dimension(spec, slice.dimension) != 0 {
            return Ok(slice.cut(self.parameter(spec)?, &spec.shape));
        }
        let name = self.file_of(&spec.path)?.to_owned();
        let values = self.file(name)?.read_rows(&spec.path, &shape, slice.range(shape[0]))?;
        Ok(from_file(&ParameterSpec { shape: slice.shape(&spec.shape), ..spec.clone() }, values))
    }
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

fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, HfError> {
    bounded_file::read_regular(path, limit).map_err(HfError::io("read", path))
}

fn parse<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, HfError> {
    serde_json::from_slice(text).map_err(|source| HfError::Json { path: path.to_owned(), source })
}
