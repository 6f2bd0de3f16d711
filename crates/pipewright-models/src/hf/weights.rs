//! The weights of a model directory as a source of parameters: which file has which tensor.

use std::borrow::Cow;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use pipewright::tensor::TensorShard;
use serde::Deserialize;

use super::directory::resolve;
use super::error::HfError;
use super::file::SafetensorsFile;
use super::json_file::{parse, read_bytes};
use super::layout::{FilePlace, INDEX, SINGLE, from_file, is_of_rows, places};
use super::other_form::{names, other_form};
use super::weight_type::WeightType;
use crate::parameter::{ParameterSource, ParameterSpec};
use crate::quantisation::companions;

/// The largest index that is read. An index has about a hundred bytes for each tensor.
const LARGEST_INDEX: u64 = 1 << 28;

/// The weights of a directory. Files are opened when they are first needed.
pub(super) struct Weights {
    dir: PathBuf,
    /// The file or folder that says which tensors there are.
    index: PathBuf,
    /// The file of each tensor.
    files: BTreeMap<String, String>,
    open: HashMap<String, SafetensorsFile>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The names of tensors with the matrices of all experts that are read. Experts without a gate have `up_proj`.
const STACKS: [&str; 3] = ["gate_up_proj", "up_proj", "down_proj"];

/// The beginnings of the names of all parameters but those of the head.
pub(super) const PREFIXES: [&str; 3] = ["model.", "backbone.", "transformer."];

/// Returns the names that a parameter may have in files. Files of a model without its head have no prefix.
pub(super) fn file_names_of(parameter: &str) -> impl Iterator<Item = Cow<'_, str>> {
    let rest = PREFIXES.into_iter().find_map(|prefix| parameter.strip_prefix(prefix));
    let in_backbone = rest.filter(|_| parameter.starts_with("backbone.")).map(|rest| format!("model.{rest}"));
    let names = [Some(Cow::from(parameter)), in_backbone.map(Cow::from), rest.map(Cow::from)];
    names.into_iter().flatten()
}

impl Weights {
    pub(super) fn open(dir: &Path) -> Result<Self, HfError> {
        let dir = resolve(dir)?;
        let (index, single) = (dir.join(INDEX), dir.join(SINGLE));
        let mut weights =
            Self { dir: dir.clone(), index: index.clone(), files: BTreeMap::new(), open: HashMap::new() };
        if single.is_file() {
            weights.index = single;
            weights.add_file(SINGLE.to_owned())?;
        } else if index.is_file() {
            weights.files = parse::<Index>(&index, &read_bytes(&index, LARGEST_INDEX)?)?.weight_map;
        } else {
            weights.index.clone_from(&dir);
            for shard in shards(&dir)? {
                weights.add_file(shard)?;
            }
        }
        Ok(weights)
    }

    /// Opens a file that no index describes, and adds its tensors.
    fn add_file(&mut self, name: String) -> Result<(), HfError> {
        let tensors = self.file(name.clone())?.tensors();
        self.files.extend(tensors.into_iter().map(|tensor| (tensor, name.clone())));
        Ok(())
    }

    /// Returns the place at which the files have a parameter, with the name that they have for the tensor.
    pub(super) fn place_of(&self, spec: &ParameterSpec) -> Option<FilePlace<String>> {
        places(spec).into_iter().find_map(|FilePlace { tensor, shape, elements }| {
            let tensor = file_names_of(tensor).find(|name| self.files.contains_key(&**name))?.into_owned();
            Some(FilePlace { tensor, shape, elements })
        })
    }

    /// Returns the place of a parameter in the files, and the file that has it.
    pub(super) fn find(&self, spec: &ParameterSpec) -> Result<(FilePlace<String>, String), HfError> {
        let quantised = spec.tensors().find_map(|tensor| Some((tensor, self.quantised(tensor)?)));
        if let Some((tensor, found)) = quantised {
            let (path, tensor) = (self.index.clone(), tensor.to_owned());
            return Err(HfError::QuantisedTensor { path, tensor, found });
        }
        let place = self.place_of(spec).ok_or_else(|| self.missing(spec))?;
        let file = self.file_of(&place.tensor)?;
        Ok((place, file))
    }

    /// Returns the name of a tensor in the files that only a quantised tensor has.
    fn quantised(&self, tensor: &str) -> Option<String> {
        let names = file_names_of(tensor).flat_map(|name| companions(&name));
        names.into_iter().find(|name| self.files.contains_key(name))
    }

    /// Returns the error of a parameter that the files do not have.
    fn missing(&self, spec: &ParameterSpec) -> HfError {
        let (path, tensor) = (self.index.clone(), spec.tensor().to_owned());
        match self.of_all_experts(spec) {
            Some(found) => HfError::UnknownExperts { path, tensor, found },
            None => HfError::MissingTensor { path, tensor },
        }
    }

    /// Returns the name of a tensor in the files that belongs to all experts of the mixture of a parameter, in
    /// a form that is not read.
    fn of_all_experts(&self, spec: &ParameterSpec) -> Option<String> {
        let list = |tensor: &str| Some(format!("{}.experts.", tensor.split_once(".experts.")?.0));
        let lists: Vec<String> = spec.tensors().filter_map(list).collect();
        let is_of_all = |name: &&str| {
            let names = lists.iter().flat_map(|list| file_names_of(list));
            let part = names.into_iter().find_map(|list| name.strip_prefix(&*list));
            let is_known =
                |part: &str| STACKS.contains(&part) || part.starts_with(|first: char| first.is_ascii_digit());
            part.is_some_and(|part| !is_known(part))
        };
        self.tensors().find(is_of_all).map(str::to_owned)
    }

    /// Returns the file that has the tensor of this name, which is one of [`Weights::tensors`].
    pub(super) fn file_of(&self, tensor: &str) -> Result<String, HfError> {
        let file = self.files[tensor].clone();
        self.require_plain_name(tensor, &file)?;
        Ok(file)
    }

    /// Returns the names of all tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Returns the file or folder that says which tensors there are.
    pub(super) fn index(&self) -> &Path {
        &self.index
    }

    pub(super) fn directory(&self) -> &Path {
        &self.dir
    }

    /// Returns the names of all files with weights.
    pub(super) fn file_names(&self) -> Result<BTreeSet<String>, HfError> {
        self.files.iter().try_for_each(|(tensor, file)| self.require_plain_name(tensor, file))?;
        Ok(self.files.values().cloned().collect())
    }

    /// Returns the element types of all tensors, under the names that the files have. Types that are not read
    /// count as single precision.
    pub(super) fn types(&mut self) -> Result<BTreeMap<String, WeightType>, HfError> {
        let mut types = BTreeMap::new();
        for (tensor, file) in self.files.clone() {
            let kind = self.file(file)?.element_type(&tensor).unwrap_or_default();
            types.insert(tensor, kind);
        }
        Ok(types)
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

    /// Refuses values that training cannot start from.
    fn require_finite(&self, tensor: &str, file: &str, values: Vec<f32>) -> Result<Vec<f32>, HfError> {
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(element) => Err(HfError::NotFinite {
                path: self.dir.join(file),
                tensor: tensor.to_owned(),
                value: values[element],
            }),
        }
    }
}

/// Returns the files of a model in several files, such as `model-00001-of-00002.safetensors`, if all of them
/// are in the folder.
fn shards(dir: &Path) -> Result<Vec<String>, HfError> {
    let found: Vec<(String, u32, u32)> = names(dir).into_iter().filter_map(shard).collect();
    let Some(&(ref first, number, count)) = found.first() else {
        return Err(match other_form(dir) {
            Some(form) => HfError::OtherForm { path: dir.to_owned(), form },
            None => HfError::NoWeights { dir: dir.to_owned() },
        });
    };
    let name = |index: u32| {
        let (own, wanted) = (format!("-{number:05}-of-"), format!("-{index:05}-of-"));
        first.replacen(&own, &wanted, 1)
    };
    let has = |name: &String| found.iter().any(|(other, ..)| other == name);
    let missing: Vec<String> = (1..=count).map(name).filter(|name| !has(name)).collect();
    if missing.is_empty() {
        Ok((1..=count).map(name).collect())
    } else {
        Err(HfError::MissingShards { dir: dir.to_owned(), missing })
    }
}

/// Returns the name of a file, its number among the files of its model, and their count.
fn shard(name: String) -> Option<(String, u32, u32)> {
    /// More files are a mistake.
    const MOST: u32 = 10_000;
    let (start, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = start.rsplit_once('-')?;
    let is_number = |digits: &str| digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
    if !is_number(number) || !is_number(count) || stem.starts_with("consolidated") {
        return None;
    }
    let (number, count) = (number.parse().ok()?, count.parse().ok()?);
    (count <= MOST).then_some((name, number, count))
}

impl ParameterSource for Weights {
    type Error = HfError;

    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, HfError> {
        let (FilePlace { tensor, shape, elements }, file) = self.find(spec)?;
        let values = self.file(file.clone())?.read_elements(&tensor, &shape, elements)?;
        let values = match &spec.layout.entry {
            None => values,
            Some(entry) => entry.columns_of(values),
        };
        Ok(from_file(spec, self.require_finite(&tensor, &file, values)?))
    }

    /// Reads no more of the file than the shard if its elements follow each other there.
    fn shard_of(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<Vec<f32>, HfError> {
        if !is_of_rows(spec, shard.dimension) {
            return Ok(shard.cut(self.parameter(spec)?, &spec.shape));
        }
        let (FilePlace { tensor, shape, elements }, file) = self.find(spec)?;
        let all = spec.shape[shard.dimension];
        let (rows, in_a_row) = (shard.range(all), elements.len() / all.max(1));
        let elements = elements.start + rows.start * in_a_row..elements.start + rows.end * in_a_row;
        let values = self.file(file.clone())?.read_elements(&tensor, &shape, elements)?;
        let values = self.require_finite(&tensor, &file, values)?;
        Ok(from_file(&ParameterSpec { shape: shard.shape(&spec.shape), ..spec.clone() }, values))
    }
}
