//! Reads the configuration and the stages of a model directory.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use pipewright::bounded_file::{self, SMALL_TEXT};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::file::SafetensorsFile;
use super::layout::{file_shape, from_file};
use super::{CONFIG, HfError, INDEX, SINGLE};
use crate::family::{ModelConfig, ModelFamily};
use crate::parameter::{ParameterSource, ParameterSpec};

/// The configuration in `dir/config.json`.
///
/// # Errors
/// When the file cannot be read or parsed, or describes a model that no family here computes.
pub fn read_config(dir: &Path) -> Result<ModelConfig, HfError> {
    let path = dir.join(CONFIG);
    let text = read_bytes(&path, SMALL_TEXT)?;
    let json = parse(&path, &text)?;
    ModelConfig::from_json(json).map_err(|source| {
        let line = source.key().and_then(|key| line_of(&text, &key));
        HfError::Config { path, line, source }
    })
}

/// The line of the first mention of a key, counted from 1. A nested key is given as `outer.inner`.
fn line_of(json: &[u8], key: &str) -> Option<usize> {
    let text = std::str::from_utf8(json).ok()?;
    let quoted = format!("\"{}\"", key.split('.').next_back()?);
    Some(text[..text.find(&quoted)?].matches('\n').count() + 1)
}

/// The stage of `config`'s model that holds `layers`, with the weights in `dir`, on `device`.
///
/// Only the tensors of these layers are read, and converted to `f32` from `F32`, `BF16` or `F16`. Tensors that the model
/// does not know are not read.
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
    config.build_stage(layers, &mut Weights::open(dir)?, device)
}

/// The largest index that is read. An index has about a hundred bytes for each tensor.
const LARGEST_INDEX: u64 = 1 << 28;

/// The weights of a directory; files are opened when first needed.
struct Weights {
    dir: PathBuf,
    place: Place,
    open: HashMap<String, SafetensorsFile>,
}

/// Which file a tensor is in.
enum Place {
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
        let place = if dir.join(SINGLE).is_file() {
            Place::Single
        } else if index.is_file() {
            Place::Indexed(parse::<Index>(&index, &read_bytes(&index, LARGEST_INDEX)?)?.weight_map)
        } else {
            return Err(HfError::NoWeights { dir: dir.to_owned() });
        };
        Ok(Self { dir: dir.to_owned(), place, open: HashMap::new() })
    }

    fn file_of(&self, tensor: &str) -> Result<&str, HfError> {
        let Place::Indexed(map) = &self.place else { return Ok(SINGLE) };
        let index = || self.dir.join(INDEX);
        let missing = || HfError::MissingTensor { path: index(), tensor: tensor.to_owned() };
        let file = map.get(tensor).ok_or_else(missing)?;
        if Path::new(file).file_name() != Some(file.as_ref()) {
            return Err(HfError::IndexFile { path: index(), tensor: tensor.to_owned(), file: file.clone() });
        }
        Ok(file)
    }
}

impl ParameterSource for Weights {
    type Error = HfError;

    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, HfError> {
        let name = self.file_of(&spec.path)?.to_owned();
        let path = self.dir.join(&name);
        let file = match self.open.entry(name) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(SafetensorsFile::open(path)?),
        };
        Ok(from_file(spec, file.read(&spec.path, &file_shape(spec))?))
    }
}

/// The content of a small JSON file.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, HfError> {
    parse(path, &read_bytes(path, SMALL_TEXT)?)
}

fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, HfError> {
    bounded_file::read_regular(path, limit).map_err(HfError::io("read", path))
}

fn parse<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, HfError> {
    serde_json::from_slice(text).map_err(|source| HfError::Json { path: path.to_owned(), source })
}
