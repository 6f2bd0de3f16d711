//! Writes stages as a model directory.
//!
//! Everything is written into a scratch folder next to the target. The folder is renamed when it is complete
//! and on disk. A failure at any moment leaves no incomplete model and does not change existing files.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use pipewright::nn::TensorParallel;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Value, json};

use super::file::bad_header;
use super::layout::{CONFIG, INDEX, SINGLE, file_shape, to_file};
use super::origin::{WeightTypes, copy_files, with_original_keys};
use super::weight_type::WeightType;
use crate::error::ModelError;
use crate::family::{ModelFamily, file_json};
use crate::file_layout::TensorEntry;
use crate::parameter::ParameterSpec;
use crate::stage::{ModelStage, parameter_specs, visit_parameters};

/// Weights above this size are split into several files, as Hugging Face does.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// Writes the model that consists of `stages` into `dir`, which must not exist or must be empty.
///
/// # Errors
/// When a stage has shards of its parameters, because several ranks compute it together, or as [`Writer`]'s
/// functions.
pub fn save(dir: &Path, config: &dyn ModelFamily, stages: &[&ModelStage]) -> Result<(), ModelError> {
    stages.iter().try_for_each(|stage| require_whole(stage))?;
    let specs = stages.iter().flat_map(|stage| parameter_specs(stage)).collect();
    let mut writer = Writer::create(dir, config, specs, DEFAULT_SHARD_BYTES)?;
    for stage in stages {
        writer.write_stage(stage)?;
    }
    writer.finish()
}

/// An unfinished model directory. Tensors are announced first and written in any order. If the writer is
/// dropped before [`Writer::finish`], the directory is removed.
#[derive(Debug)]
pub struct Writer {
    target: PathBuf,
    scratch: Scratch,
    /// The content of `config.json`.
    config: Value,
    /// [`Family::renamed`](pipewright_shapes::family::Family::renamed).
    key_names: &'static [(&'static str, &'static str)],
    files: Vec<(PathBuf, File)>,
    /// The parameters that are not written yet.
    pending: BTreeMap<String, Slot>,
}

/// A tensor with its element type, described by a parameter that is in it.
#[derive(Debug)]
pub(super) struct Typed {
    pub(super) spec: ParameterSpec,
    pub(super) kind: WeightType,
}

impl Typed {
    /// Returns the name of the tensor.
    fn name(&self) -> &str {
        self.spec.tensor()
    }

    fn bytes(&self) -> u64 {
        file_shape(&self.spec).iter().product::<usize>() as u64 * self.kind.bytes() as u64
    }
}

/// The position in the files of the tensor that has a parameter.
#[derive(Debug)]
struct Slot {
    tensor: Typed,
    file: usize,
    offset: u64,
}

impl Writer {
    /// Announces the model's tensors and lays out their files, each of at most `max_shard_bytes` unless a
    /// single tensor is larger.
    ///
    /// # Errors
    /// When `dir` has content, when a tensor is announced twice, or when the system reports an error.
    pub fn create(
        dir: &Path,
        config: &dyn ModelFamily,
        tensors: Vec<ParameterSpec>,
        max_shard_bytes: u64,
    ) -> Result<Self, ModelError> {
        Self::create_as(dir, config, tensors, &WeightTypes::default(), max_shard_bytes)
    }

    /// Like [`Writer::create`], but with the element types `types`.
    ///
    /// # Errors
    /// As [`Writer::create`].
    pub fn create_as(
        dir: &Path,
        config: &dyn ModelFamily,
        tensors: Vec<ParameterSpec>,
        types: &WeightTypes,
        max_shard_bytes: u64,
    ) -> Result<Self, ModelError> {
        let target = std::path::absolute(dir).map_err(ModelError::io("resolve", dir))?;
        require_vacant(&target)?;
        let mut sorted = BTreeMap::new();
        for spec in tensors {
            if let Some(ParameterSpec { path, .. }) = sorted.insert(spec.path.clone(), spec) {
                let fault = "belongs to two stages: each layer must be written once";
                return Err(ModelError::new(format!("tensor `{path}` {fault}")));
            }
        }
        // Specs that a caller has made may have another layout than files.
        for spec in config.outline(0..config.layers(), &TensorParallel::default())? {
            if let Some(announced) = sorted.get_mut(&spec.path) {
                announced.layout = spec.layout;
            }
        }
        let mut typed = BTreeMap::new();
        for spec in sorted.values() {
            let (spec, kind) = (spec.clone(), types.of(spec));
            typed.entry(spec.tensor().to_owned()).or_insert(Typed { spec, kind });
        }
        let shards = plan(typed.into_values(), max_shard_bytes);

        let scratch = Scratch::create(&target)?;
        let (key_names, config) = (config.family().renamed, json_of_type(config, types.default));
        let (files, pending) = (Vec::new(), BTreeMap::new());
        let mut writer = Self { target, scratch, config, key_names, files, pending };
        let count = shards.len();
        let mut total: u64 = 0;
        let mut weight_map = BTreeMap::new();
        let mut slots = HashMap::new();
        for (index, shard) in shards.iter().enumerate() {
            let name = file_name(index, count);
            for tensor in shard {
                total += tensor.bytes();
                weight_map.insert(tensor.name(), name.clone());
            }
            let mut offset = writer.create_file(&name, shard)?;
            for tensor in shard {
                slots.insert(tensor.name(), (tensor.kind, index, offset));
                offset += tensor.bytes();
            }
        }
        for (path, spec) in sorted {
            let (kind, file, offset) = slots[spec.tensor()];
            writer.pending.insert(path, Slot { tensor: Typed { spec, kind }, file, offset });
        }
        if count > 1 {
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            writer.scratch.write_json(INDEX, &index)?;
        }
        writer.scratch.write_json(CONFIG, &writer.config)?;
        Ok(writer)
    }

    /// Adds the files of a folder that [`super::keep_origin`] filled, and the keys of its `config.json` that
    /// the configuration does not have.
    ///
    /// # Errors
    /// When a file of the folder cannot be read, or when the system reports an error.
    pub fn add_origin(&mut self, origin: &Path) -> Result<(), ModelError> {
        copy_files(origin, &self.scratch.path)?;
        let config = with_original_keys(self.config.clone(), origin, self.key_names)?;
        self.scratch.write_json(CONFIG, &config)
    }

    /// Creates a file at its full length, with its header, and returns the offset of the first tensor.
    fn create_file(&mut self, name: &str, tensors: &[Typed]) -> Result<u64, ModelError> {
        let path = self.scratch.path.join(name);
        let (header, length) = header(tensors).map_err(|source| bad_header(&path, source))?;
        // A parameter may be every second column of an entry. The other columns are read first, and written
        // back.
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.and_then(|mut file| {
            file.set_len(header.len() as u64 + length)?;
            file.write_all(&header)?;
            Ok(file)
        });
        let file = file.map_err(ModelError::io("write", &path))?;
        self.files.push((path, file));
        Ok(header.len() as u64)
    }

    /// Writes the parameter `path`, with its elements in Burn's order.
    ///
    /// # Errors
    /// When the tensor was not announced, is written already, or has another number of elements, or when the
    /// system reports an error.
    pub fn write(&mut self, path: &str, values: &[f32]) -> Result<(), ModelError> {
        let refuse = |fault: String| -> Result<(), ModelError> {
            Err(ModelError::new(format!("tensor `{path}` {fault}")))
        };
        let Some(slot) = self.pending.get(path) else {
            return refuse("was not announced, or is written already".to_owned());
        };
        let Typed { spec, kind } = &slot.tensor;
        let expected: usize = spec.shape.iter().product();
        if values.len() != expected {
            let found = values.len();
            return refuse(format!("was announced with {expected} elements, {found} were given"));
        }
        let Some(data) = kind.encode(&to_file(spec, values)) else {
            let fault = "has values that are too large for";
            return refuse(format!("{fault} {}: choose float32 or bfloat16", kind.name()));
        };
        let (file_path, file) = &mut self.files[slot.file];
        let written = match (&spec.layout.entry, &spec.layout.stack) {
            (Some(entry), _) => write_entry(file, slot, entry, &data),
            (None, Some(stack)) if stack.is_usual => {
                write_at(file, slot.offset + (stack.index() * data.len()) as u64, &data)
            }
            (None, _) => write_at(file, slot.offset, &data),
        };
        written.map_err(ModelError::io("write", file_path))?;
        self.pending.remove(path);
        Ok(())
    }

    /// Writes all parameters of a stage.
    ///
    /// # Errors
    /// When the stage has shards of its parameters, because several ranks compute it together, or as
    /// [`Writer::write`], for the first parameter that fails.
    pub fn write_stage(&mut self, stage: &ModelStage) -> Result<(), ModelError> {
        require_whole(stage)?;
        let mut result = Ok(());
        visit_parameters(stage, |spec, _, data| {
            if result.is_ok() {
                let values: Vec<f32> = data().iter().collect();
                result = self.write(&spec.path, &values);
            }
        });
        result
    }

    /// Gives the complete directory its final name.
    ///
    /// # Errors
    /// When an announced tensor was not written, when the target has content, or when the system reports an
    /// error.
    pub fn finish(mut self) -> Result<(), ModelError> {
        if let Some(tensor) = self.pending.pop_first().map(|(path, _)| path) {
            return Err(ModelError::new(format!("tensor `{tensor}` was announced and not written")));
        }
        for (path, file) in &self.files {
            file.sync_all().map_err(ModelError::io("write", path))?;
        }
        require_vacant(&self.target)?;
        self.scratch.rename_to(&self.target)
    }
}

fn write_at(file: &mut File, offset: u64, data: &[u8]) -> io::Result<()> {
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(data)
}

/// Writes a parameter into its columns of an entry of a tensor.
fn write_entry(file: &mut File, slot: &Slot, entry: &TensorEntry, data: &[u8]) -> io::Result<()> {
    let bytes = slot.tensor.bytes() / entry.count as u64;
    let offset = slot.offset + entry.index as u64 * bytes;
    if entry.step == 1 {
        return write_at(file, offset, data);
    }
    let mut whole = vec![0; data.len() * entry.step];
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(&mut whole)?;
    let element = slot.tensor.kind.bytes();
    let columns = whole.chunks_exact_mut(element).skip(entry.first).step_by(entry.step);
    columns.zip(data.chunks_exact(element)).for_each(|(to, from)| to.copy_from_slice(from));
    write_at(file, offset, &whole)
}

/// Refuses a stage that has shards of its parameters.
fn require_whole(stage: &ModelStage) -> Result<(), ModelError> {
    let mut result = Ok(());
    visit_parameters(stage, |ParameterSpec { path: tensor, .. }, placement, _| {
        if result.is_ok() && placement.shards > 1 {
            result = Err(ModelError::new(format!(
                "the stage has one of {} shards of tensor `{tensor}`: save a checkpoint and write the model with `export`, \
                 which puts the shards together",
                placement.shards
            )));
        }
    });
    result
}

/// Distributes tensors over files in path order. There is at least one file, even without tensors.
fn plan(tensors: impl Iterator<Item = Typed>, max_shard_bytes: u64) -> Vec<Vec<Typed>> {
    let mut shards = vec![Vec::new()];
    let mut used = 0;
    for tensor in tensors {
        let size = tensor.bytes();
        if used > 0 && used + size > max_shard_bytes {
            shards.push(Vec::new());
            used = 0;
        }
        used += size;
        shards.last_mut().expect("there is one from the start").push(tensor);
    }
    shards
}

pub(super) fn file_name(index: usize, count: usize) -> String {
    if count == 1 { SINGLE.to_owned() } else { format!("model-{:05}-of-{count:05}.safetensors", index + 1) }
}

/// Returns the content of a model's `config.json` for weights of this type.
fn json_of_type(config: &dyn ModelFamily, kind: WeightType) -> Value {
    let mut json = file_json(config);
    // The name up to version 4 of transformers, and the one from version 5 on.
    json["torch_dtype"] = kind.name().into();
    json["dtype"] = kind.name().into();
    json
}

/// Returns the length field and header of a file with these tensors, and the number of bytes of the tensors.
pub(super) fn header(tensors: &[Typed]) -> Result<(Vec<u8>, u64), serde_json::Error> {
    let mut offset = 0;
    let tensors = tensors.iter().map(|tensor| {
        let (start, spec) = (offset, &tensor.spec);
        offset += tensor.bytes() as usize;
        (
            tensor.name().to_owned(),
            TensorInfo { dtype: tensor.kind.dtype(), shape: file_shape(spec), data_offsets: (start, offset) },
        )
    });
    let header = header_of(tensors.collect())?;
    Ok((header, offset as u64))
}

/// Returns the length field and header of a file with these tensors, which follow each other.
pub(super) fn header_of(tensors: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, serde_json::Error> {
    // Other readers reject a file that does not name the framework of its layout.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), tensors).map_err(serde::ser::Error::custom)?;
    let mut json = serde_json::to_vec(&metadata)?;
    // Tensors start at a multiple of eight, as the format recommends.
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

pub(super) fn require_vacant(dir: &Path) -> Result<(), ModelError> {
    match fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(ModelError::at(dir, "the folder is not empty; choose one that does not exist")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(ModelError::io("write to", dir)(source)),
    }
}

/// A folder that is removed unless it is renamed.
#[derive(Debug)]
pub(super) struct Scratch {
    path: PathBuf,
    renamed: bool,
}

impl Scratch {
    /// Creates a folder next to `target`, so that the rename stays within one file system.
    pub(super) fn create(target: &Path) -> Result<Self, ModelError> {
        let parent = target.parent().unwrap_or(target);
        fs::create_dir_all(parent).map_err(ModelError::io("create", parent))?;
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        for attempt in 0_u64.. {
            let path = parent.join(format!(".{name}.partial-{}-{attempt}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path, renamed: false }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(ModelError::io("create", &path)(source)),
            }
        }
        unreachable!("a folder cannot contain 2^64 others")
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn write_json(&self, name: &str, json: &Value) -> Result<(), ModelError> {
        let path = self.path.join(name);
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(format!("{json:#}\n").as_bytes())?;
            file.sync_all()
        });
        written.map_err(ModelError::io("write", &path))
    }

    pub(super) fn rename_to(&mut self, target: &Path) -> Result<(), ModelError> {
        // Not every system renames onto an empty folder.
        match fs::remove_dir(target) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => fs::rename(&self.path, target),
        }
        .map_err(ModelError::io("write to", target))?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.renamed {
            // Best effort: the name of a remaining folder shows that it is incomplete.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
