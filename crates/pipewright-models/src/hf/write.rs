//! Writes stages as a model directory.
//!
//! Everything is written into a scratch folder next to the target. The folder is renamed when it is complete
//! and on disk. A failure at any moment leaves no incomplete model and does not change existing files.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use pipewright::nn::TensorParallel;
use pipewright::stage::StageModule;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Value, json};

use super::error::HfError;
use super::layout::{CONFIG, INDEX, SINGLE, file_shape, to_file};
use super::origin::{WeightTypes, copy_files, with_original_keys};
use super::weight_type::WeightType;
use crate::family::ModelFamily;
use crate::file_layout::TensorEntry;
use crate::parameter::{ParameterSpec, parameter_specs, visit_parameters};

/// Weights above this size are split into several files, as Hugging Face does.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// Writes the model that consists of `stages` into `dir`, which must not exist or must be empty.
///
/// # Errors
/// When a stage has shards of its parameters, because several ranks compute it together, or as [`Writer`]'s
/// functions.
pub fn save<F: ModelFamily>(dir: &Path, config: &F, stages: &[&F::Stage]) -> Result<(), HfError> {
    stages.iter().try_for_each(|stage| require_whole(*stage))?;
    let specs = stages.iter().flat_map(|stage| parameter_specs(*stage)).collect();
    let mut writer = Writer::create(dir, config, specs, DEFAULT_SHARD_BYTES)?;
    for stage in stages {
        writer.write_stage(*stage)?;
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
    /// [`ModelFamily::RENAMED`].
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
    pub fn create<F: ModelFamily>(
        dir: &Path,
        config: &F,
        tensors: Vec<ParameterSpec>,
        max_shard_bytes: u64,
    ) -> Result<Self, HfError> {
        Self::create_as(dir, config, tensors, &WeightTypes::default(), max_shard_bytes)
    }

    /// Like [`Writer::create`], but with the element types `types`.
    ///
    /// # Errors
    /// As [`Writer::create`].
    pub fn create_as<F: ModelFamily>(
        dir: &Path,
        config: &F,
        tensors: Vec<ParameterSpec>,
        types: &WeightTypes,
        max_shard_bytes: u64,
    ) -> Result<Self, HfError> {
        let target = std::path::absolute(dir).map_err(HfError::io("resolve", dir))?;
        require_vacant(&target)?;
        let mut sorted = BTreeMap::new();
        for spec in tensors {
            if let Some(spec) = sorted.insert(spec.path.clone(), spec) {
                return Err(HfError::Duplicate { tensor: spec.path });
            }
        }
        // A module does not know how files store its parameters.
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
        let config = file_json(config, types.default);
        let (key_names, files, pending) = (F::RENAMED, Vec::new(), BTreeMap::new());
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
    pub fn add_origin(&mut self, origin: &Path) -> Result<(), HfError> {
        copy_files(origin, &self.scratch.path)?;
        let config = with_original_keys(self.config.clone(), origin, self.key_names)?;
        self.scratch.write_json(CONFIG, &config)
    }

    /// Creates a file at its full length, with its header, and returns the offset of the first tensor.
    fn create_file(&mut self, name: &str, tensors: &[Typed]) -> Result<u64, HfError> {
        let path = self.scratch.path.join(name);
        let (header, length) =
            header(tensors).map_err(|source| HfError::Header { path: path.clone(), source })?;
        // A parameter may be every second column of an entry. The other columns are read first, and written
        // back.
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.and_then(|mut file| {
            file.set_len(header.len() as u64 + length)?;
            file.write_all(&header)?;
            Ok(file)
        });
        let file = file.map_err(HfError::io("write", &path))?;
        self.files.push((path, file));
        Ok(header.len() as u64)
    }

    /// Writes the parameter `path`, with its elements in Burn's order.
    ///
    /// # Errors
    /// When the tensor was not announced, is written already, or has another number of elements, or when the
    /// system reports an error.
    pub fn write(&mut self, path: &str, values: &[f32]) -> Result<(), HfError> {
        let slot = self.pending.get(path).ok_or_else(|| HfError::Unexpected { tensor: path.to_owned() })?;
        let Typed { spec, kind } = &slot.tensor;
        let expected = spec.shape.iter().product();
        if values.len() != expected {
            return Err(HfError::Elements { tensor: path.to_owned(), expected, found: values.len() });
        }
        let too_large = || HfError::TooLarge { tensor: path.to_owned(), kind: *kind };
        let data = kind.encode(&to_file(spec, values)).ok_or_else(too_large)?;
        let (file_path, file) = &mut self.files[slot.file];
        let written = match &spec.layout.entry {
            None => write_at(file, slot.offset, &data),
            Some(entry) => write_entry(file, slot, entry, &data),
        };
        written.map_err(HfError::io("write", file_path))?;
        self.pending.remove(path);
        Ok(())
    }

    /// Writes all parameters of a stage.
    ///
    /// # Errors
    /// When the stage has shards of its parameters, because several ranks compute it together, or as
    /// [`Writer::write`], for the first parameter that fails.
    pub fn write_stage<M: StageModule>(&mut self, stage: &M) -> Result<(), HfError> {
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
    pub fn finish(mut self) -> Result<(), HfError> {
        if let Some(tensor) = self.pending.pop_first().map(|(path, _)| path) {
            return Err(HfError::Unwritten { tensor });
        }
        for (path, file) in &self.files {
            file.sync_all().map_err(HfError::io("write", path))?;
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
fn require_whole<M: StageModule>(stage: &M) -> Result<(), HfError> {
    let mut result = Ok(());
    visit_parameters(stage, |ParameterSpec { path: tensor, .. }, placement, _| {
        if result.is_ok() && placement.shards > 1 {
            result = Err(HfError::Shard { tensor, shards: placement.shards });
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

fn file_name(index: usize, count: usize) -> String {
    if count == 1 { SINGLE.to_owned() } else { format!("model-{:05}-of-{count:05}.safetensors", index + 1) }
}

/// Returns the content of a model's `config.json`, with the keys that transformers would fill in differently.
fn file_json<F: ModelFamily>(config: &F, kind: WeightType) -> Value {
    let mut json = config.to_json();
    // The name up to version 4 of transformers, and the one from version 5 on.
    json["torch_dtype"] = kind.name().into();
    json["dtype"] = kind.name().into();
    let assumes_width = F::ABSENT.iter().any(|(key, _)| *key == "head_dim");
    let sizes = (json["hidden_size"].as_u64(), json["num_attention_heads"].as_u64());
    if let (true, None, (Some(width), Some(heads))) = (assumes_width, json.get("head_dim"), sizes) {
        json["head_dim"] = (width / heads.max(1)).into();
    }
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
    let tensors = tensors.collect();
    // Other readers reject a file that does not name the framework of its layout.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), tensors).map_err(serde::ser::Error::custom)?;
    let mut json = serde_json::to_vec(&metadata)?;
    // Tensors start at a multiple of eight, as the format recommends.
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok((header, offset as u64))
}

pub(super) fn require_vacant(dir: &Path) -> Result<(), HfError> {
    match fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(HfError::NotEmpty { dir: dir.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(HfError::Io { action: "write to", path: dir.to_owned(), source }),
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
    pub(super) fn create(target: &Path) -> Result<Self, HfError> {
        let parent = target.parent().unwrap_or(target);
        fs::create_dir_all(parent).map_err(HfError::io("create", parent))?;
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        for attempt in 0_u64.. {
            let path = parent.join(format!(".{name}.partial-{}-{attempt}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path, renamed: false }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(HfError::Io { action: "create", path, source }),
            }
        }
        unreachable!("a folder cannot contain 2^64 others")
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn write_json(&self, name: &str, json: &Value) -> Result<(), HfError> {
        let path = self.path.join(name);
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(format!("{json:#}\n").as_bytes())?;
            file.sync_all()
        });
        written.map_err(HfError::io("write", &path))
    }

    pub(super) fn rename_to(&mut self, target: &Path) -> Result<(), HfError> {
        // Not every system renames onto an empty folder.
        match fs::remove_dir(target) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => fs::rename(&self.path, target),
        }
        .map_err(HfError::io("write to", target))?;
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
