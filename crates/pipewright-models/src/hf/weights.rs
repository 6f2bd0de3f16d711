//! The weights of a model directory as a source of parameters: which file has which tensor.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use pipewright::tensor::Slice;
use serde::Deserialize;

use super::file::SafetensorsFile;
use super::layout::{file_dimension, file_shape, from_file};
use super::read::{parse, read_bytes};
use super::{HfError, INDEX, SINGLE};
use crate::parameter::{ParameterSource, ParameterSpec};

/// The largest index that is read. An index has about a hundred bytes for each tensor.
const LARGEST_INDEX: u64 = 1 << 28;

/// The weights of a directory. Files are opened when they are first needed.
pub(super) struct Weights {
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
    pub(super) fn open(dir: &Path) -> Result<Self, HfError> {
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

    pub(super) fn file_of(&self, tensor: &str) -> Result<&str, HfError> {
        let WeightFiles::Indexed(map) = &self.files else { return Ok(SINGLE) };
        let missing = || HfError::MissingTensor { path: self.dir.join(INDEX), tensor: tensor.to_owned() };
        let file = map.get(tensor).ok_or_else(missing)?;
        self.require_plain_name(tensor, file)?;
        Ok(file)
    }

    /// Returns the names of all files with weights.
    pub(super) fn file_names(&self) -> Result<BTreeSet<String>, HfError> {
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
    pub(super) fn file(&mut self, name: String) -> Result<&mut SafetensorsFile, HfError> {
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
