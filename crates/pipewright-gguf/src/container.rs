//! The parts of a model in GGUF: one file, or several that are named `NAME-00001-of-00003.gguf`.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use pipewright_system::bounded_file::open_regular;
use serde_json::{Map, Value};

use crate::error::GgufError;
use crate::parse;
use crate::tensor::{Tensor, TensorKind};

/// The ending of the files.
pub const ENDING: &str = "gguf";
/// The most parts of a model; more are a mistake.
const MOST_PARTS: usize = 1000;

/// The headers of all parts of a model.
#[derive(Debug)]
pub struct Gguf {
    /// The path of the first part.
    pub path: PathBuf,
    /// The metadata of the first part.
    pub metadata: Map<String, Value>,
    /// Each part with its tensors.
    pub parts: Vec<(PathBuf, Vec<Tensor>)>,
}

impl Gguf {
    /// Reads the headers of the parts of a model; `path` is the first part.
    ///
    /// # Errors
    /// When a file is missing, is not in GGUF of version 2 or 3, is cut short or contradicts itself.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let (metadata, tensors) = parse::header(path)?;
        let mut parts = vec![(path.to_owned(), tensors)];
        if let Some((stem, index, count)) = part_of(path) {
            if index != 1 {
                let first = format!("{stem}-00001-of-{count:05}.{ENDING}");
                return Err(GgufError::at(path, format!("this is a later part of a model: name {first}")));
            }
            for index in 2..=count {
                let part = path.with_file_name(format!("{stem}-{index:05}-of-{count:05}.{ENDING}"));
                parts.push((part.clone(), parse::header(&part)?.1));
            }
        }
        let mut names = BTreeSet::new();
        for (part, tensors) in &parts {
            if let Some(tensor) = tensors.iter().find(|tensor| !names.insert(tensor.name.as_str())) {
                let fault = format!("tensor `{}` exists twice: copy or download the file again", tensor.name);
                return Err(GgufError::at(part, fault));
            }
        }
        Ok(Self { path: path.to_owned(), metadata, parts })
    }

    /// Returns the tensors of all parts.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.parts.iter().flat_map(|(_, tensors)| tensors)
    }

    /// Returns the tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors().find(|tensor| tensor.name == name)
    }

    /// Reads a short tensor of numbers that are not quantised.
    pub(crate) fn numbers(&self, name: &str) -> Result<Option<Vec<f32>>, GgufError> {
        /// Frequencies of positions have at most a few hundred numbers.
        const MOST: u64 = 1 << 20;
        let found = self.parts.iter().find_map(|(path, tensors)| {
            tensors.iter().find(|tensor| tensor.name == name).map(|tensor| (path, tensor))
        });
        let Some((path, tensor)) = found else { return Ok(None) };
        if tensor.bytes > MOST {
            return Err(GgufError::at(
                path,
                format!("tensor `{name}` has {} bytes, which is too many", tensor.bytes),
            ));
        }
        let mut bytes = vec![0; tensor.bytes as usize];
        let read = open_regular(path).and_then(|mut file| {
            file.seek(SeekFrom::Start(tensor.start))?;
            file.read_exact(&mut bytes)
        });
        read.map_err(GgufError::io(path))?;
        let pairs = || bytes.as_chunks::<2>().0.iter().copied();
        Ok(match tensor.kind {
            TensorKind::F32 => Some(bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect()),
            TensorKind::F16 => Some(pairs().map(|pair| f16::from_le_bytes(pair).to_f32()).collect()),
            TensorKind::Bf16 => Some(pairs().map(|pair| bf16::from_le_bytes(pair).to_f32()).collect()),
            TensorKind::Blocks(_) => None,
        })
    }
}

/// Returns the name, the number and the count of a part of a model in several files.
fn part_of(path: &Path) -> Option<(&str, usize, usize)> {
    let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, count) = name.rsplit_once("-of-")?;
    let (stem, index) = rest.rsplit_once('-')?;
    let number = |digits: &str| (digits.len() == 5).then(|| digits.parse().ok()).flatten();
    let (index, count) = (number(index)?, number(count)?);
    (1..=MOST_PARTS).contains(&count).then_some((stem, index, count))
}

/// Returns whether two paths are the same file, or parts of the same model in several files.
pub fn are_parts(one: &Path, other: &Path) -> bool {
    let part = |path: &Path| part_of(path).map(|(stem, _, count)| (stem.to_owned(), count));
    one.file_name() == other.file_name()
        || part(one).is_some_and(|part_of_one| part(other) == Some(part_of_one))
}

/// Returns the first file of the model in GGUF at a path: a file that ends in `.gguf`, or the only one in a folder
/// without safetensors.
pub fn locate(path: &Path) -> Option<PathBuf> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|ending| ending == ENDING) && path.is_file();
    if is_gguf(path) {
        return Some(path.to_owned());
    }
    let entries: Vec<PathBuf> = fs::read_dir(path).ok()?.flatten().map(|entry| entry.path()).collect();
    let is_other = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name == "adapter_config.json")
            || path.extension().is_some_and(|ending| ending == "safetensors")
    };
    if entries.iter().any(is_other) {
        return None;
    }
    let is_first = |path: &PathBuf| is_gguf(path) && part_of(path).is_none_or(|(_, index, _)| index == 1);
    let mut found = entries.into_iter().filter(is_first);
    found.next().filter(|_| found.next().is_none())
}
