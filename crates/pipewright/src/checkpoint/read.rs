//! Reading a checkpoint: everything is verified when it is opened, then tensors are read by global path.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{Bytes, DType, Shape, TensorData};

use super::error::CheckpointError;
use super::manifest::{Manifest, StateFile};
use super::optimizer::FIELD;
use super::save::{LOSS_SCALE, STEP};
use super::tensor_file::{Header, from_stored, hash, read_header};
use crate::loss_scale::LossScale;
use crate::tensor::shard::RowShard;

/// A complete checkpoint whose files have been verified.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    tensors: BTreeMap<String, Place>,
    scalars: BTreeMap<String, String>,
    parameters: BTreeSet<String>,
    loss_scale: Option<LossScale>,
}

/// The place of a tensor in the files, with its type and shape.
#[derive(Debug)]
struct Place {
    dtype: DType,
    shape: Vec<usize>,
    /// Its rows, in order: all in one file, or divided among the files of replicas.
    pieces: Vec<Piece>,
    /// Further copies of the same rows.
    copies: Vec<Piece>,
}

/// Rows of a tensor that are stored in one file.
#[derive(Debug)]
struct Piece {
    part: RowShard,
    rows: usize,
    file: usize,
    /// The place of their first byte in the file.
    start: u64,
}

/// A parameter in a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor<'a> {
    /// Its global path.
    pub path: &'a str,
    /// Its shape in the model.
    pub shape: &'a [usize],
    /// Its element type.
    pub dtype: DType,
}

impl Checkpoint {
    /// Opens a checkpoint's folder and reads every byte once to verify it.
    ///
    /// # Errors
    /// When the manifest or a file is missing, damaged, cut short or of another step. The error names the file.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(path)?;
        let (mut tensors, mut scalars, mut loss_scale) = (BTreeMap::new(), BTreeMap::new(), None);
        for (index, file) in manifest.files.iter().enumerate() {
            let header = verify(path, file, manifest.step)?;
            let part = file.part.unwrap_or(RowShard::WHOLE);
            for (name, info) in header.tensors {
                let unknown =
                    || CheckpointError::ElementType { tensor: name.clone(), dtype: info.dtype.to_string() };
                let dtype = from_stored(info.dtype).ok_or_else(unknown)?;
                let rows = info.shape.first().copied().unwrap_or(1);
                let piece =
                    Piece { part, rows, file: index, start: header.data + info.data_offsets.0 as u64 };
                let torn = || CheckpointError::Torn { path: path.to_owned(), tensor: name.clone() };
                let place = tensors.entry(name.clone()).or_insert_with(|| Place::new(dtype, &info.shape));
                match place.add(piece, dtype, &info.shape) {
                    Ok(()) => {}
                    Err(Unfit::Part) => return Err(torn()),
                    Err(Unfit::Copy(other)) => return Err(ambiguous(path, &manifest, &name, [other, index])),
                }
            }
            // All files have the same.
            loss_scale = loss_scale.or(header.texts.get(LOSS_SCALE).and_then(|text| scale_of(text)));
            scalars.extend(header.texts.into_iter().filter(|(name, _)| name.contains(FIELD)));
        }
        for (tensor, place) in &mut tensors {
            compare_copies(path, &manifest, tensor, place)?;
            place
                .join()
                .map_err(|Torn| CheckpointError::Torn { path: path.to_owned(), tensor: tensor.clone() })?;
        }
        let parameters = tensors.keys().filter(|name| !name.contains(FIELD)).cloned().collect();
        Ok(Self { path: path.to_owned(), manifest, tensors, scalars, parameters, loss_scale })
    }

    /// Returns the checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the number of optimizer steps taken.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Returns the loss scale of the next step; `None` if the run had none.
    pub(crate) fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scale
    }

    /// Returns the parameters, by path.
    pub fn parameters(&self) -> impl Iterator<Item = StoredTensor<'_>> {
        self.parameters.iter().map(|path| {
            let place = &self.tensors[path];
            StoredTensor { path, shape: &place.shape, dtype: place.dtype }
        })
    }

    /// Reads the values of a parameter, which must have this shape and element type.
    ///
    /// # Errors
    /// When there is no such parameter, its shape or type differs, or the file cannot be read.
    pub fn parameter(
        &self,
        parameter: &Arc<str>,
        shape: &[usize],
        dtype: DType,
    ) -> Result<TensorData, CheckpointError> {
        self.part_of(parameter, shape, dtype, RowShard::WHOLE)
    }

    /// As [`Checkpoint::parameter`], for the rows of one part; `shape` is the shape of the whole parameter.
    pub(crate) fn part_of(
        &self,
        parameter: &Arc<str>,
        shape: &[usize],
        dtype: DType,
        part: RowShard,
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
        self.read(parameter, part)
    }

    /// Returns the tensors of a parameter's optimizer state: the field and the full name of each.
    pub(super) fn state_of(&self, parameter: &str) -> impl Iterator<Item = (&str, &str)> {
        fields(&self.tensors, parameter).map(|(field, name, _)| (field, name))
    }

    /// Returns the numbers of a parameter's optimizer state: the field and the text of each.
    pub(super) fn scalars_of(&self, parameter: &str) -> impl Iterator<Item = (&str, &str)> {
        fields(&self.scalars, parameter).map(|(field, _, text)| (field, text.as_str()))
    }

    /// Reads a part of a tensor, which must be in the checkpoint.
    pub(super) fn read(&self, name: &str, part: RowShard) -> Result<TensorData, CheckpointError> {
        let place = &self.tensors[name];
        let wanted = part.rows(place.rows());
        let in_a_row = place.bytes_in_a_row();
        let mut bytes = vec![0; wanted.len() * in_a_row];
        let (mut first, mut filled) = (0, 0);
        for piece in &place.pieces {
            let rows = wanted.start.max(first)..wanted.end.min(first + piece.rows);
            if !rows.is_empty() {
                let path = self.path.join(&self.manifest.files[piece.file].name);
                let target = &mut bytes[filled..][..rows.len() * in_a_row];
                let start = piece.start + ((rows.start - first) * in_a_row) as u64;
                let read = File::open(&path).and_then(|mut file| {
                    file.seek(SeekFrom::Start(start))?;
                    file.read_exact(target)
                });
                read.map_err(CheckpointError::io("read", &path))?;
                filled += target.len();
            }
            first += piece.rows;
        }
        let mut shape = place.shape.clone();
        if let Some(rows) = shape.first_mut() {
            *rows = wanted.len();
        }
        Ok(TensorData::from_bytes(Bytes::from_bytes_vec(bytes), Shape::from(shape), place.dtype))
    }
}

/// Returns the loss scale of a file's header.
fn scale_of(text: &str) -> Option<LossScale> {
    let (factor, updates) = text.split_once(' ')?;
    Some(LossScale { factor: factor.parse().ok()?, updates: updates.parse().ok()? })
}

/// The error for parts of a tensor that do not make up the whole.
struct Torn;

/// The reason why rows do not fit the tensor that they belong to.
enum Unfit {
    /// Their shape or type differs from that of the other rows.
    Part,
    /// This file has the same rows in another shape.
    Copy(usize),
}

impl Place {
    fn new(dtype: DType, shape: &[usize]) -> Self {
        Self { dtype, shape: shape.to_vec(), pieces: Vec::new(), copies: Vec::new() }
    }

    /// Adds rows of the tensor, of this type and shape.
    fn add(&mut self, piece: Piece, dtype: DType, shape: &[usize]) -> Result<(), Unfit> {
        let is_alike = dtype == self.dtype && shape.iter().skip(1).eq(self.shape.iter().skip(1));
        match self.pieces.iter().find(|other| other.part == piece.part) {
            Some(other) if is_alike && other.rows == piece.rows => self.copies.push(piece),
            Some(other) => return Err(Unfit::Copy(other.file)),
            None if is_alike => self.pieces.push(piece),
            None => return Err(Unfit::Part),
        }
        Ok(())
    }

    fn bytes_in_a_row(&self) -> usize {
        self.shape.iter().skip(1).product::<usize>() * self.dtype.size()
    }

    fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Puts the pieces in order and sets the shape of the whole tensor.
    fn join(&mut self) -> Result<(), Torn> {
        self.pieces.sort_unstable_by_key(|piece| piece.part.index);
        let rows = self.pieces.iter().map(|piece| piece.rows).sum();
        let RowShard { index, of } = self.pieces[0].part;
        // A tensor that every replica has whole is stored by the first replica only.
        if index == 0 && self.pieces.len() == 1 {
            return Ok(());
        }
        let expected =
            RowShard::all(of).map(|part| (part, part.rows(rows).len())).filter(|(_, rows)| *rows > 0);
        let found = self.pieces.iter().map(|piece| (piece.part, piece.rows)).filter(|(_, rows)| *rows > 0);
        if !expected.eq(found) {
            return Err(Torn);
        }
        if let Some(first) = self.shape.first_mut() {
            *first = rows;
        }
        Ok(())
    }
}

/// Returns the entries named `PARAMETER@FIELD`, with their fields.
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

/// Checks that all copies of a tensor's rows are equal, as those of a shared parameter are. Then any copy may be read.
fn compare_copies(
    path: &Path,
    manifest: &Manifest,
    tensor: &str,
    place: &Place,
) -> Result<(), CheckpointError> {
    for copy in &place.copies {
        let first = place.pieces.iter().find(|piece| piece.part == copy.part);
        let first = first.expect("a copy is of rows that are there");
        let bytes = (copy.rows * place.bytes_in_a_row()) as u64;
        let hash_of = |piece: &Piece| {
            let path = path.join(&manifest.files[piece.file].name);
            let hash = File::open(&path).and_then(|mut file| {
                file.seek(SeekFrom::Start(piece.start))?;
                hash(file.take(bytes))
            });
            hash.map_err(CheckpointError::io("read", &path))
        };
        if hash_of(first)? != hash_of(copy)? {
            return Err(ambiguous(path, manifest, tensor, [first.file, copy.file]));
        }
    }
    Ok(())
}

fn ambiguous(path: &Path, manifest: &Manifest, tensor: &str, files: [usize; 2]) -> CheckpointError {
    let [first, second] = files.map(|file| manifest.files[file].name.clone());
    CheckpointError::Ambiguous { path: path.to_owned(), tensor: tensor.to_owned(), files: (first, second) }
}

/// Reads the whole file once and returns its header if the content matches the manifest.
fn verify(checkpoint: &Path, entry: &StateFile, step: u64) -> Result<Header, CheckpointError> {
    let path = checkpoint.join(&entry.name);
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(CheckpointError::MissingFile { path });
        }
        Err(source) => return Err(CheckpointError::Io { action: "open", path, source }),
    };
    let header = read_header(&mut file);
    let text = header.as_ref().and_then(|header| header.texts.get(STEP));
    if let Some(found) = text.and_then(|text| text.parse().ok())
        && found != step
    {
        return Err(CheckpointError::ForeignFile { path, expected: step, found });
    }
    let read = |file: &mut File| {
        let found = file.metadata()?.len();
        file.rewind()?;
        Ok((found, hash(file)?))
    };
    let (found, hash) = read(&mut file).map_err(CheckpointError::io("read", &path))?;
    if found != entry.bytes {
        return Err(CheckpointError::FileLength { path, expected: entry.bytes, found });
    }
    match header {
        Some(header) if hash.to_hex().as_str() == entry.hash => Ok(header),
        _ => Err(CheckpointError::DamagedFile { path }),
    }
}
