//! The weights of a model directory as a source of parameters: which file has which tensor.

use std::borrow::Cow;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use pipewright::memory::StreamedMatrix;
use pipewright::tensor::TensorShard;
use pipewright_gguf::{Gguf, GgufError, tensors_of};
use pipewright_kernel::quantised::{BlockKind, CutError, QuantisedMatrix};
use safetensors::Dtype;
use serde::Deserialize;
use serde_json::Value;

use super::directory::{is_gguf, resolve};
use super::file::{WeightFile, missing_tensor, require_finite};
use super::json_file::{parse, read_bytes, read_json};
use super::layout::{
    CONFIG, FilePlace, INDEX, SINGLE, file_shape, from_file, is_of_rows, outputs_first, places,
};
use super::other_form::{names, other_form};
use super::vocabulary_rows::{is_of_vocabulary, with_means};
use super::weight_type::WeightType;
use crate::error::ModelError;
use crate::family::ModelFamily;
use crate::file_layout::FileLayout;
use crate::parameter::{ParameterKind, ParameterSource, ParameterSpec};
use crate::quantisation::{DescribedForm, companions, described_form};

/// The largest index that is read. An index has about a hundred bytes for each tensor.
const LARGEST_INDEX: u64 = 1 << 28;

/// The matrix of a head of labels, which takes the place of the head's.
pub(super) const LABELS: &str = "score.weight";

/// The weights of a directory. Files are opened when they are first needed.
pub(crate) struct Weights {
    dir: PathBuf,
    /// The folder of the model, or its GGUF file.
    model: PathBuf,
    is_gguf: bool,
    /// The file or folder that says which tensors there are.
    index: PathBuf,
    /// The file of each tensor.
    files: BTreeMap<String, String>,
    open: HashMap<String, WeightFile>,
    /// Whether matrices of linear layers that are quantised stay so, in place of being decoded.
    keeps_quantised: bool,
    /// The values of a head of labels that the files do not have.
    labels: Option<Vec<f32>>,
    /// The form of quantised matrices that the configuration describes.
    described: Option<DescribedForm>,
    /// The number of token ids in the configuration. A model with further ids has the means of the rows as theirs.
    vocabulary: Option<usize>,
    /// Whether files are read past the page cache.
    is_direct: bool,
    /// The same weights for direct reads, if matrices of linear layers are read when they are needed.
    pub(super) reader: Option<Arc<Mutex<Weights>>>,
    /// The tensors in blocks of a GGUF file.
    pub(super) blocks: BTreeMap<String, BlockKind>,
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
    pub(super) fn open(dir: &Path) -> Result<Self, ModelError> {
        let dir = resolve(dir)?;
        if is_gguf(&dir) {
            return Self::open_gguf(dir);
        }
        let (index, single) = (dir.join(INDEX), dir.join(SINGLE));
        let mut weights = Self {
            dir: dir.clone(),
            model: dir.clone(),
            is_gguf: false,
            index: index.clone(),
            files: BTreeMap::new(),
            open: HashMap::new(),
            keeps_quantised: false,
            labels: None,
            described: None,
            vocabulary: None,
            is_direct: false,
            reader: None,
            blocks: BTreeMap::new(),
        };
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
        let config = read_json::<Value>(&weights.dir.join(CONFIG)).ok();
        weights.described = config.as_ref().and_then(described_form);
        let vocabulary = config.as_ref().and_then(|config| config["vocab_size"].as_u64());
        weights.vocabulary = vocabulary.and_then(|vocabulary| usize::try_from(vocabulary).ok());
        Ok(weights)
    }

    /// Opens the parts of a model in GGUF.
    fn open_gguf(model: PathBuf) -> Result<Self, ModelError> {
        let gguf = Gguf::open(&model).map_err(refused)?;
        let dir = model.parent().unwrap_or(Path::new("")).to_owned();
        let (mut files, mut open, mut blocks) = (BTreeMap::new(), HashMap::new(), BTreeMap::new());
        for (path, tensors) in tensors_of(&gguf).map_err(refused)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            files.extend(tensors.iter().map(|tensor| (tensor.name.clone(), name.clone())));
            let file = WeightFile::open_gguf(path, tensors)?;
            let kinds = file
                .tensors()
                .into_iter()
                .filter_map(|tensor| Some((tensor.clone(), file.blocks_of(&tensor)?)));
            blocks.extend(kinds);
            open.insert(name, file);
        }
        let index = model.clone();
        Ok(Self {
            dir,
            model,
            is_gguf: true,
            index,
            files,
            open,
            keeps_quantised: false,
            labels: None,
            described: None,
            vocabulary: None,
            is_direct: false,
            reader: None,
            blocks,
        })
    }

    /// Returns the weights, whose quantised matrices stay as they are.
    pub(crate) fn keeping_quantised(self) -> Self {
        Self { keeps_quantised: true, ..self }
    }

    /// Returns the weights, with values of `seed` for the head of labels of `config` if the files do not have it.
    pub(crate) fn drawing_labels(self, seed: u64, config: &dyn ModelFamily) -> Result<Self, ModelError> {
        let Some(labels) = config.head().labels else { return Ok(self) };
        let shape = vec![config.head().width, labels];
        let spec = ParameterSpec::new(LABELS.to_owned(), shape, ParameterKind::Matrix);
        let labels = self.lacks_labels(&spec).then(|| config.initial(seed).parameter(&spec)).transpose()?;
        Ok(Self { labels, ..self })
    }

    /// Returns whether a parameter is the matrix of a head of labels, and the files do not have it.
    pub(super) fn lacks_labels(&self, spec: &ParameterSpec) -> bool {
        spec.path == LABELS && self.place_of(spec).is_none()
    }

    /// Returns the weights, whose matrices of linear layers `reader` reads when they are needed.
    pub(super) fn with_reader(self, reader: Arc<Mutex<Self>>) -> Self {
        Self { reader: Some(reader), ..self }
    }

    /// Returns the weights, whose files are read past the page cache. A file is opened with the first matrix that it has.
    pub(super) fn reading_directly(mut self) -> Result<Self, ModelError> {
        self.is_direct = true;
        for (name, file) in std::mem::take(&mut self.open) {
            self.open.insert(name, file.reading_directly()?);
        }
        Ok(self)
    }

    /// Returns the form of quantised matrices that the configuration describes.
    pub(super) fn described(&self) -> Option<DescribedForm> {
        self.described
    }

    /// Opens a file that no index describes, and adds its tensors.
    fn add_file(&mut self, name: String) -> Result<(), ModelError> {
        let tensors = self.file(name.clone())?.tensors();
        self.files.extend(tensors.into_iter().map(|tensor| (tensor, name.clone())));
        Ok(())
    }

    /// Returns the description of a parameter in these files.
    pub(super) fn in_files<'a>(&self, spec: &'a ParameterSpec) -> Cow<'a, ParameterSpec> {
        if self.is_gguf && spec.layout.inputs_first {
            Cow::Owned(outputs_first(spec))
        } else {
            Cow::Borrowed(spec)
        }
    }

    /// Returns the place at which the files have a parameter, with the name that they have for the tensor.
    pub(super) fn place_of(&self, spec: &ParameterSpec) -> Option<FilePlace<String>> {
        places(&self.in_files(spec)).into_iter().find_map(|FilePlace { tensor, shape, elements }| {
            let tensor = file_names_of(tensor).find(|name| self.files.contains_key(&**name))?.into_owned();
            match (self.own_rows(spec), &*shape) {
                (Some(rows), &[_, width]) => {
                    Some(FilePlace { tensor, shape: vec![rows, width], elements: 0..rows * width })
                }
                _ => Some(FilePlace { tensor, shape, elements }),
            }
        })
    }

    /// Returns the number of rows of a parameter that the files have, if the model has further token ids.
    pub(super) fn own_rows(&self, spec: &ParameterSpec) -> Option<usize> {
        self.vocabulary.filter(|rows| is_of_vocabulary(spec) && *rows < file_shape(spec)[0])
    }

    /// Returns the place of a parameter in the files, and the file that has it.
    pub(super) fn find(&self, spec: &ParameterSpec) -> Result<(FilePlace<String>, String), ModelError> {
        let quantised = spec.tensors().find_map(|tensor| Some((tensor, self.quantised(tensor)?)));
        if let Some((tensor, found)) = quantised {
            let fault = format!(
                "tensor `{tensor}` is quantised, because there is `{found}` too, and training needs whole weights: use the model \
                 from which the quantised one was made; if transformers has undone the quantisation, write the model again with \
                 `save_original_format=False`"
            );
            return Err(ModelError::at(&self.index, fault));
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
    fn missing(&self, spec: &ParameterSpec) -> ModelError {
        let tensor = spec.tensor();
        let Some(found) = self.of_all_experts(spec) else { return missing_tensor(&self.index, tensor) };
        let fault = format!(
            "tensor `{tensor}` is missing, and `{found}` belongs to all experts, in a form that is not read: load the model with \
             transformers, and write it with `model.save_pretrained(DIR, save_original_format=False)`"
        );
        ModelError::at(&self.index, fault)
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
    pub(super) fn file_of(&self, tensor: &str) -> Result<String, ModelError> {
        let file = self.files[tensor].clone();
        self.require_plain_name(tensor, &file)?;
        Ok(file)
    }

    /// Returns the names of all tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Returns whether there is a tensor of this name.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.files.contains_key(tensor)
    }

    /// Returns the file or folder that says which tensors there are.
    pub(super) fn index(&self) -> &Path {
        &self.index
    }

    pub(super) fn directory(&self) -> &Path {
        &self.model
    }

    /// Returns the path of a file with weights.
    pub(super) fn path_of(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }

    /// Returns the names of all files with weights.
    pub(super) fn file_names(&self) -> Result<BTreeSet<String>, ModelError> {
        self.files.iter().try_for_each(|(tensor, file)| self.require_plain_name(tensor, file))?;
        Ok(self.files.values().cloned().collect())
    }

    /// Returns the element types of all tensors, under the names that the files have. Types that are not read
    /// count as single precision.
    pub(super) fn types(&mut self) -> Result<BTreeMap<String, WeightType>, ModelError> {
        let mut types = BTreeMap::new();
        let parts = self.parts_of_quantised();
        for (tensor, file) in self.files.clone() {
            if let Some(matrix) = parts.get(&tensor) {
                // The matrix alone is written again, without its scales.
                types.insert(matrix.clone(), WeightType::Bfloat16);
                continue;
            }
            let kind = self.file(file)?.element_type(&tensor).unwrap_or_default();
            types.insert(tensor, kind);
        }
        Ok(types)
    }

    /// Returns the element type, the shape and the number of bytes of a tensor.
    pub(super) fn describe(&mut self, tensor: &str) -> Result<(Dtype, Vec<usize>, usize), ModelError> {
        let file = self.file_of(tensor)?;
        let described = self.file(file)?.describe(tensor);
        described.ok_or_else(|| missing_tensor(&self.index, tensor))
    }

    /// Returns an error if a name leads out of the directory.
    fn require_plain_name(&self, tensor: &str, file: &str) -> Result<(), ModelError> {
        if Path::new(file).file_name() == Some(file.as_ref()) {
            return Ok(());
        }
        let fault = format!("tensor `{tensor}` is said to be in `{file}`, which is not a plain file name");
        Err(ModelError::at(&self.dir.join(INDEX), fault))
    }

    /// Opens the file of this name, unless it is open already.
    pub(super) fn file(&mut self, name: String) -> Result<&mut WeightFile, ModelError> {
        let path = self.dir.join(&name);
        match self.open.entry(name) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let file = WeightFile::open(path)?;
                Ok(entry.insert(if self.is_direct { file.reading_directly()? } else { file }))
            }
        }
    }
}

/// Returns the error of a GGUF file.
fn refused(error: GgufError) -> ModelError {
    let text = error.to_string();
    match error.source() {
        Some(_) => ModelError::new(text).because(error),
        None => ModelError::new(text),
    }
}

/// Returns the files of a model in several files, such as `model-00001-of-00002.safetensors`, if all of them
/// are in the folder.
fn shards(dir: &Path) -> Result<Vec<String>, ModelError> {
    let found: Vec<(String, u32, u32)> = names(dir).into_iter().filter_map(shard).collect();
    let Some(&(ref first, number, count)) = found.first() else {
        return Err(match other_form(dir) {
            Some(form) => ModelError::at(dir, form),
            None => {
                let fault = "the folder has neither model.safetensors nor model.safetensors.index.json";
                ModelError::at(dir, format!("{fault}; name a folder with weights"))
            }
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
        let (count, first) = (missing.len(), missing.iter().take(3).cloned().collect::<Vec<_>>().join(", "));
        let more = if count > 3 { ", ..." } else { "" };
        let fault = format!("{count} of the model's files are missing: {first}{more}");
        Err(ModelError::at(dir, format!("{fault}; copy or download them again")))
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
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        if self.lacks_labels(spec)
            && let Some(drawn) = &self.labels
        {
            return Ok(drawn.clone());
        }
        if let Some(place) = self.quantised_place(spec) {
            // The rows are outputs also where the files have entries of a larger tensor.
            let plain = ParameterSpec {
                layout: FileLayout { parts: spec.layout.parts, ..FileLayout::default() },
                ..spec.clone()
            };
            return Ok(from_file(&plain, self.read_quantised(spec, &place)?.decoded()));
        }
        let (FilePlace { tensor, shape, elements }, file) = self.find(spec)?;
        let values = self.file(file.clone())?.read_elements(&tensor, &shape, elements)?;
        let values = match &spec.layout.entry {
            None => values,
            Some(entry) => entry.columns_of(values),
        };
        let kind = self.file(file.clone())?.element_type(&tensor).unwrap_or_default();
        let values = match self.own_rows(spec) {
            Some(own) => with_means(values, own, file_shape(spec)[0], kind),
            None => values,
        };
        Ok(from_file(&self.in_files(spec), require_finite(&self.dir.join(file), &tensor, values)?))
    }

    /// Reads no more of the file than the shard if its elements follow each other there.
    fn shard_of(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<Vec<f32>, ModelError> {
        let spec = &*self.in_files(spec);
        let is_drawn = self.labels.is_some() && self.lacks_labels(spec);
        let is_whole = self.quantised_place(spec).is_some() || self.own_rows(spec).is_some() || is_drawn;
        if !is_of_rows(spec, shard.dimension) || is_whole {
            return Ok(shard.cut(self.parameter(spec)?, &spec.shape));
        }
        let (FilePlace { tensor, shape, elements }, file) = self.find(spec)?;
        let all = spec.shape[shard.dimension];
        let (rows, in_a_row) = (shard.range(all), elements.len() / all.max(1));
        let elements = elements.start + rows.start * in_a_row..elements.start + rows.end * in_a_row;
        let values = self.file(file.clone())?.read_elements(&tensor, &shape, elements)?;
        let values = require_finite(&self.dir.join(file), &tensor, values)?;
        Ok(from_file(&ParameterSpec { shape: shard.shape(&spec.shape), ..spec.clone() }, values))
    }

    /// Reads the whole matrix, of which the shard stays.
    fn quantised(
        &mut self,
        spec: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<Option<QuantisedMatrix>, ModelError> {
        let Some(place) = self.quantised_place(spec).filter(|_| self.keeps_quantised) else {
            return Ok(None);
        };
        let matrix = self.read_quantised(spec, &place)?;
        self.shard_of_matrix(matrix, spec, shard, &place.tensor).map(Some)
    }

    fn streamed(
        &mut self,
        spec: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<Option<StreamedMatrix>, ModelError> {
        self.streamed_matrix(spec, shard)
    }
}

impl Weights {
    /// Returns the shard of a whole matrix, whose rows are the outputs in the order of the file.
    pub(super) fn shard_of_matrix(
        &self,
        matrix: QuantisedMatrix,
        spec: &ParameterSpec,
        shard: TensorShard,
        tensor: &str,
    ) -> Result<QuantisedMatrix, ModelError> {
        let refused = |error: CutError| {
            let fault = "its blocks have elements of several rows of a joined projection; use a model that is not quantised";
            ModelError::at(&self.index, format!("tensor `{tensor}`: {error}: {fault}"))
        };
        let matrix = match &spec.layout.parts {
            Some(parts) => matrix.gathered(&parts.places()).map_err(refused)?,
            None => matrix,
        };
        if shard.is_whole() {
            return Ok(matrix);
        }
        let own = shard.range(spec.shape[shard.dimension]);
        let (inputs, outputs) = (0..matrix.columns(), 0..matrix.rows());
        // The rows of a table are its first dimension.
        let of_rows = usize::from(spec.kind == ParameterKind::Matrix);
        let (rows, columns) = if shard.dimension == of_rows { (own, inputs) } else { (outputs, own) };
        matrix.part(rows, columns).map_err(refused)
    }
}
