//! Reading a checkpoint: everything is verified when it is opened, then tensors are read by global path.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{Bytes, DType, Shape, TensorData};

use super::error::CheckpointError;
use super::manifest::{Manifest, Shard};
use super::optimizer::FIELD;
use super::save::STEP;
use super::tensor_file::{Header, from_stored, hash, read_header};

/// A complete checkpoint whose files are as they were written.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    tensors: BTreeMap<String, Place>,
    scalars: BTreeMap<String, String>,
    parameters: BTreeSet<String>,
}

/// Where a tensor is, and what it is.
#[derive(Debug)]
struct Place {
    shard: usize,
    start: u64,
    bytes: usize,
    dtype: DType,
    shape: Vec<usize>,
}

/// A parameter as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor<'a> {
    /// Its global path.
    pub path: &'a str,
    /// Its shape, as the model holds it.
    pub shape: &'a [usize],
    /// Its element type.
    pub dtype: DType,
}

impl Checkpoint {
    /// Opens a checkpoint's folder and reads every byte of it once, to see that it is what was written.
    ///
    /// # Errors
    /// When the manifest or a shard is missing, damaged, cut short or of another step: the error names the file.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(path)?;
        let (mut tensors, mut scalars) = (BTreeMap::new(), BTreeMap::new());
        for (index, shard) in manifest.shards.iter().enumerate() {
            let header = verify(path, shard, manifest.step)?;
            for (name, info) in header.tensors {
                let (start, end) = info.data_offsets;
                let unknown =
                    || CheckpointError::ElementType { tensor: name.clone(), dtype: info.dtype.to_string() };
                let dtype = from_stored(info.dtype).ok_or_else(unknown)?;
                let start_in_file = header.data + start as u64;
                let place = Place {
                    shard: index,
                    start: start_in_file,
                    bytes: end - start,
                    dtype,
                    shape: info.shape,
                };
                // Copies of a shared parameter are equal: the first is as good as any.
                tensors.entry(name).or_insert(place);
            }
            scalars.extend(header.texts.into_iter().filter(|(name, _)| name.contains(FIELD)));
        }
        let parameters = tensors.keys().filter(|name| !name.contains(FIELD)).cloned().collect();
        Ok(Self { path: path.to_owned(), manifest, tensors, scalars, parameters })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the manifest says.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Optimizer steps taken.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The parameters, by path.
    pub fn parameters(&self) -> impl Iterator<Item = StoredTensor<'_>> {
        self.parameters.iter().map(|path| {
            let place = &self.tensors[path];
            StoredTensor { path, shape: &place.shape, dtype: place.dtype }
        })
    }

    /// The values of a parameter, which must have this shape and element type.
    ///
    /// # Errors
    /// When there is no such parameter, it is another, or the file cannot be read.
    pub fn parameter(
        &self,
        parameter: &Arc<str>,
        shape: &[usize],
        dtype: DType,
    ) -> Result<TensorData, CheckpointError> {
        let path = || self.path.clone();
        let Some(place) = self.tensors.get(&**parameter) else {
            return Err(CheckpointError::MissingParameter { path: path(), parameter: parameter.clone() });
        };
        if place.shape != shape || place.dtype != dtype {
            let words = |dtype: DType, shape: &[usize]| format!("{dtype:?} {shape:?}");
            let (expected, found) = (words(dtype, shape), words(place.dtype, &place.shape));
            return Err(CheckpointError::Mismatch {
                path: path(),
                parameter: parameter.clone(),
                expected,
                found,
            });
        }
        self.read(parameter)
    }

    /// The tensors of a parameter's optimizer state: field and full name of each.
    pub(super) fn state_of(&self, parameter: &str) -> impl Iterator<Item = (&str, &str)> {
        fields(&self.tensors, parameter).map(|(field, name, _)| (field, name))
    }

    /// The numbers of a parameter's optimizer state, as text by field.
    pub(super) fn scalars_of(&self, parameter: &str) -> impl Iterator<Item = (&str, &str)> {
        fields(&self.scalars, parameter).map(|(field, _, text)| (field, text.as_str()))
    }

    /// A tensor that is there.
    pub(super) fn read(&self, name: &str) -> Result<TensorData, CheckpointError> {
        let place = &self.tensors[name];
        let path = self.path.join(&self.manifest.shards[place.shard].name);
        let mut bytes = vec![0; place.bytes];
        let read = File::open(&path).and_then(|mut file| {
            file.seek(SeekFrom::Start(place.start))?;
            file.read_exact(&mut bytes)
        });
        read.map_err(CheckpointError::io("read", &path))?;
        let shape = Shape::from(place.shape.clone());
        Ok(TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape, place.dtype))
    }
}

/// The entries named `PARAMETER@FIELD`, with their fields.
fn fields<'a, T>(
    map: &'a BTreeMap<String, T>,
    parameter: &str,
) -> impl Iterator<Item = (&'a str, &'a str, &'a T)> {
    let prefix = format!("{parameter}{FIELD}");
    let from = map.range::<str, _>((Bound::Included(prefix.as_str()), Bound::Unbounded));
    let found: Vec<_> = from
        .map_while(|(name, value)| name.strip_prefix(&prefix).map(|field| (field, name.as_str(), value)))
        .collect();
    found.into_iter()
}

/// Reads the whole shard once; returns its header if it is as the manifest says.
fn verify(checkpoint: &Path, shard: &Shard, step: u64) -> Result<Header, CheckpointError> {
    let path = checkpoint.join(&shard.name);
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(CheckpointError::MissingShard { path });
        }
        Err(source) => return Err(CheckpointError::Io { action: "open", path, source }),
    };
    let header = read_header(&mut file);
    let text = header.as_ref().and_then(|header| header.texts.get(STEP));
    if let Some(found) = text.and_then(|text| text.parse().ok())
        && found != step
    {
        return Err(CheckpointError::ForeignShard { path, expected: step, found });
    }
    let read = |file: &mut File| {
        let found = file.metadata()?.len();
        file.rewind()?;
        Ok((found, hash(file)?))
    };
    let (found, hash) = read(&mut file).map_err(CheckpointError::io("read", &path))?;
    if found != shard.bytes {
        return Err(CheckpointError::ShardLength { path, expected: shard.bytes, found });
    }
    match header {
        Some(header) if hash.to_hex().as_str() == shard.hash => Ok(header),
        _ => Err(CheckpointError::DamagedShard { path }),
    }
}
