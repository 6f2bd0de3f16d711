//! Reading a checkpoint: everything is verified when it is opened, then tensors are read by global path.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::{Bound, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{Bytes, DType, Shape, TensorData};
use pipewright_system::bounded_file::open_regular;
use serde::de::DeserializeOwned;

use super::error::CheckpointError;
use super::finite::NotFinite;
use super::location::{Location, Piece, Slab, StoredShard, Torn, Unfit, common, copy};
use super::manifest::{Manifest, StateFile};
use super::stored::{OptimizerFields, StoredState};
use super::tensor_file::{
    FIELD, FROZEN, Header, INDEX, LOSS_SCALE, ROWS, SHARDS, STEP, from_stored, hash, hash_tensors,
    not_storable, read_header,
};
use crate::loss_scale::LossScale;
use crate::tensor::TensorShard;
use crate::tensor::shard::RowShard;

/// A complete checkpoint whose files have been verified.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    tensors: BTreeMap<String, Location>,
    scalars: BTreeMap<String, String>,
    parameters: BTreeSet<String>,
    frozen: BTreeSet<String>,
    /// The loss scale after the step; `None` if the run had no loss scale.
    pub(crate) loss_scale: Option<LossScale>,
    not_finite: BTreeMap<String, NotFinite>,
}

/// The header of a file, and the elements of its tensors that are not finite if the tensors were read.
pub(super) type Checked = (Header, Option<Vec<(String, NotFinite)>>);

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
    /// When the manifest or a file is missing, damaged, cut short or of another step. The error names the
    /// file.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        Self::open_as(path, verify)
    }

    /// Opens the copy of a checkpoint on a host that has only the headers of the files, and will have the tensors that
    /// its ranks read. Only the first process of the run, which has the whole checkpoint, compares it with its hashes,
    /// and knows of elements that are not finite.
    ///
    /// # Errors
    /// When the manifest or a header is missing or damaged.
    pub fn open_part(path: &Path) -> Result<Self, CheckpointError> {
        Self::open_as(path, |path, entry, _| {
            let path = path.join(&entry.name);
            let mut file = open_regular(&path).map_err(CheckpointError::io("open", &path))?;
            let damaged = || CheckpointError::damaged(&path, "the file does not begin with a header");
            Ok((read_header(&mut file).ok_or_else(damaged)?, None))
        })
    }

    /// Opens a checkpoint. `check` returns the header of a file, and the elements that are not finite if it has read
    /// the tensors.
    fn open_as(
        path: &Path,
        check: impl Fn(&Path, &StateFile, u64) -> Result<Checked, CheckpointError>,
    ) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(path)?;
        let (mut tensors, mut scalars, mut loss_scale) = (BTreeMap::new(), BTreeMap::new(), None);
        let (mut frozen, mut is_whole) = (BTreeSet::new(), true);
        let mut not_finite: BTreeMap<String, NotFinite> = BTreeMap::new();
        for (index, file) in manifest.files.iter().enumerate() {
            let (header, flaws) = check(path, file, manifest.step)?;
            is_whole &= flaws.is_some();
            let flaws = flaws.unwrap_or_default();
            let part = file.part.unwrap_or(RowShard::WHOLE);
            let shards: BTreeMap<String, StoredShard> = listed(&path.join(&file.name), &header, SHARDS)?;
            let other_rows: BTreeMap<String, RowShard> = listed(&path.join(&file.name), &header, ROWS)?;
            frozen.extend(listed::<Vec<String>>(&path.join(&file.name), &header, FROZEN)?);
            for (name, found) in flaws.into_iter().filter(|(name, _)| !name.contains(FIELD)) {
                let name = if file.has_several { without_index(&name, &shards) } else { name };
                not_finite.entry(name).or_default().add(found);
            }
            for (name, info) in header.tensors {
                let dtype = from_stored(info.dtype).ok_or_else(|| not_storable(&name, info.dtype))?;
                let rows = info.shape.first().copied().unwrap_or(1);
                let parameter = name.split_once(FIELD).map_or(name.as_str(), |(parameter, _)| parameter);
                let part = other_rows.get(parameter).copied().unwrap_or(part);
                let piece =
                    Piece { part, rows, file: index, start: header.data + info.data_offsets.0 as u64 };
                let shard = shards.get(parameter).copied().unwrap_or(StoredShard::WHOLE);
                let name = if file.has_several { without_index(&name, &shards) } else { name };
                let location = tensors.entry(name.clone()).or_insert_with(|| Location::new(dtype, shard));
                match location.add(piece, dtype, &info.shape, shard) {
                    Ok(()) => {}
                    Err(Unfit::Part) => return Err(torn(path, &name)),
                    Err(Unfit::Copy(other)) => return Err(ambiguous(path, &manifest, &name, [other, index])),
                }
            }
            // All files have the same.
            loss_scale = loss_scale.or(header.texts.get(LOSS_SCALE).and_then(|text| scale_of(text)));
            let entries = header.texts.into_iter().filter(|(name, _)| name.contains(FIELD));
            scalars.extend(entries.map(|(name, text)| (without_index(&name, &shards), text)));
        }
        for (tensor, location) in &mut tensors {
            if is_whole {
                compare_copies(path, &manifest, tensor, location)?;
            }
            location.join().map_err(|Torn| torn(path, tensor))?;
        }
        let parameters = tensors.keys().filter(|name| !name.contains(FIELD)).cloned().collect();
        let path = path.to_owned();
        Ok(Self { path, manifest, tensors, scalars, parameters, frozen, loss_scale, not_finite })
    }

    /// Returns the ranges of bytes of a file of a checkpoint that have the parameters which `is_wanted`, by path, and
    /// their optimizer state, for a copy that [`Checkpoint::open_part`] opens. Reads the header only.
    ///
    /// # Errors
    /// When the file does not begin with a header.
    pub fn ranges_of(
        file: &Path,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<Range<u64>>, CheckpointError> {
        let mut opened = open_regular(file).map_err(CheckpointError::io("open", file))?;
        let header = read_header(&mut opened);
        let header =
            header.ok_or_else(|| CheckpointError::damaged(file, "the file does not begin with a header"))?;
        let tensors = header.tensors.iter().filter(|(name, _)| {
            let parameter = name.split_once(FIELD).map_or(name.as_str(), |(parameter, _)| parameter);
            let without_index = parameter.rsplit_once(INDEX).map_or(parameter, |(path, _)| path);
            is_wanted(parameter) || is_wanted(without_index)
        });
        let range = |(start, end): (usize, usize)| header.data + start as u64..header.data + end as u64;
        Ok(tensors.map(|(_, info)| range(info.data_offsets)).collect())
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

    /// Returns the parameters, by path.
    pub fn parameters(&self) -> impl Iterator<Item = StoredTensor<'_>> {
        self.parameters.iter().map(|path| {
            let location = &self.tensors[path];
            StoredTensor { path, shape: &location.shape, dtype: location.dtype }
        })
    }

    /// Returns the paths of the parameters that were frozen
    /// ([`Pipeline::freeze`](crate::pipeline::Pipeline::freeze)) when the checkpoint was written.
    pub fn frozen(&self) -> impl Iterator<Item = &str> {
        self.frozen.iter().map(String::as_str)
    }

    /// Returns the parameters with elements that are not finite, by path. A parameter that several stages
    /// share may be counted several times. Checkpoints are written without such parameters, except for
    /// infinite numbers in a parameter that is not trained; other programs, and earlier versions of this one,
    /// may have written them.
    pub fn not_finite(&self) -> impl Iterator<Item = (&str, NotFinite)> {
        self.not_finite.iter().map(|(path, found)| (path.as_str(), *found))
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
        self.rows(parameter, shape, dtype, TensorShard::WHOLE, RowShard::WHOLE)
    }

    /// Like [`Checkpoint::parameter`], but reads the rows of one part of a shard; `shape` is the shape of the
    /// whole shard.
    fn rows(
        &self,
        parameter: &Arc<str>,
        shape: &[usize],
        dtype: DType,
        shard: TensorShard,
        part: RowShard,
    ) -> Result<TensorData, CheckpointError> {
        let unfit = |what: String| {
            CheckpointError::unusable(&self.path, format!("{what}; resume with the model that wrote it"))
        };
        let Some(location) = self.tensors.get(&**parameter) else {
            return Err(unfit(format!("the checkpoint has no parameter `{parameter}`")));
        };
        let stored = shard.shape(&location.shape);
        if stored != shape || location.dtype != dtype {
            let words = |dtype: DType, shape: &[usize]| format!("{dtype:?} {shape:?}");
            let (expected, found) = (words(dtype, shape), words(location.dtype, &stored));
            return Err(unfit(format!(
                "`{parameter}` is {found} in the checkpoint and {expected} in the model"
            )));
        }
        self.read(parameter, shard, part)
    }

    /// Reads the rows of one part of a shard of a tensor, which must be in the checkpoint.
    fn read(&self, name: &str, shard: TensorShard, part: RowShard) -> Result<TensorData, CheckpointError> {
        let location = &self.tensors[name];
        let (wanted, element) = (location.wanted(shard, part), location.dtype.size());
        let elements: usize = wanted.iter().map(ExactSizeIterator::len).product();
        let mut bytes = vec![0; elements * element];
        for (bounds, slab) in location.slabs() {
            let Some(common) = common(&bounds, &wanted) else { continue };
            let first = bounds[0].start;
            let rows = common[0].start - first..common[0].end - first;
            if bounds[1..] == wanted[1..] {
                let in_a_row = slab.elements_in_a_row() * element;
                let target = (common[0].start - wanted[0].start) * in_a_row;
                self.read_into(slab, rows.clone(), in_a_row, &mut bytes[target..][..rows.len() * in_a_row])?;
                continue;
            }
            let in_a_row = slab.elements_in_a_row() * element;
            let mut source = vec![0; rows.len() * in_a_row];
            self.read_into(slab, rows, in_a_row, &mut source)?;
            let mut held = bounds;
            held[0] = common[0].clone();
            copy((&source, &held), (&mut bytes, &wanted), &common, element);
        }
        let mut shape = location.shape.clone();
        shape.iter_mut().zip(&wanted).for_each(|(size, range)| *size = range.len());
        Ok(TensorData::from_bytes(Bytes::from_bytes_vec(bytes), Shape::from(shape), location.dtype))
    }

    /// Reads rows of a shard into `target`.
    fn read_into(
        &self,
        slab: &Slab,
        wanted: Range<usize>,
        in_a_row: usize,
        target: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let (mut first, mut filled) = (0, 0);
        for piece in &slab.pieces {
            let rows = wanted.start.max(first)..wanted.end.min(first + piece.rows);
            if !rows.is_empty() {
                let path = self.path.join(&self.manifest.files[piece.file].name);
                let target = &mut target[filled..][..rows.len() * in_a_row];
                let start = piece.start + ((rows.start - first) * in_a_row) as u64;
                let read = open_regular(&path).and_then(|mut file| {
                    file.seek(SeekFrom::Start(start))?;
                    file.read_exact(target)
                });
                read.map_err(CheckpointError::io("read", &path))?;
                filled += target.len();
            }
            first += piece.rows;
        }
        Ok(())
    }
}

impl StoredState for Checkpoint {
    fn place(&self) -> &Path {
        &self.path
    }

    fn has_parameter(&self, path: &str) -> bool {
        self.parameters.contains(path)
    }

    fn is_frozen(&self, path: &str) -> bool {
        self.frozen.contains(path)
    }

    fn read_rows(
        &self,
        parameter: &Arc<str>,
        shape: &[usize],
        dtype: DType,
        shard: TensorShard,
        part: RowShard,
    ) -> Result<TensorData, CheckpointError> {
        self.rows(parameter, shape, dtype, shard, part)
    }

    fn read_optimizer(
        &self,
        parameter: &str,
        shard: TensorShard,
        part: RowShard,
    ) -> Result<OptimizerFields, CheckpointError> {
        let scalars =
            fields(&self.scalars, parameter).map(|(field, _, text)| (field.to_owned(), text.clone()));
        let tensors = fields(&self.tensors, parameter);
        let tensors = tensors.map(|(field, name, _)| Ok((field.to_owned(), self.read(name, shard, part)?)));
        Ok(OptimizerFields { scalars: scalars.collect(), tensors: tensors.collect::<Result<_, _>>()? })
    }
}

/// Returns what a text of a file's header lists; nothing if the header has no such text.
fn listed<T: Default + DeserializeOwned>(
    path: &Path,
    header: &Header,
    name: &str,
) -> Result<T, CheckpointError> {
    let Some(text) = header.texts.get(name) else { return Ok(T::default()) };
    let understood = serde_json::from_str(text).map_err(std::io::Error::from);
    understood.map_err(CheckpointError::io("understand", path))
}

/// Returns the name of a tensor or of a number without the index of its shard, if it has one.
fn without_index(name: &str, shards: &BTreeMap<String, StoredShard>) -> String {
    let (parameter, field) = name.split_once(FIELD).map_or((name, None), |(path, field)| (path, Some(field)));
    let is_index =
        |index: &str| shards.get(parameter).is_some_and(|shard| shard.part.index.to_string() == index);
    match parameter.rsplit_once(INDEX).filter(|(_, index)| is_index(index)) {
        Some((path, _)) => field.map_or(path.to_owned(), |field| format!("{path}{FIELD}{field}")),
        None => name.to_owned(),
    }
}

/// Returns the loss scale of a file's header.
fn scale_of(text: &str) -> Option<LossScale> {
    let mut parts = text.split(' ');
    let (factor, updates) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let next = parts.next().map_or(Some(factor), |next| next.parse().ok())?;
    Some(LossScale { factor, updates, next })
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

/// Checks that all copies of a tensor's rows are equal, as the copies of a shared parameter are. Then any
/// copy may be read.
fn compare_copies(
    path: &Path,
    manifest: &Manifest,
    tensor: &str,
    location: &Location,
) -> Result<(), CheckpointError> {
    for (first, copy, bytes) in location.copies() {
        let hash_of = |piece: &Piece| {
            let path = path.join(&manifest.files[piece.file].name);
            let hash = open_regular(&path).and_then(|mut file| {
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
    CheckpointError::unusable(
        path,
        format!(
            "`{tensor}` differs between {first} and {second}: two parameters had this path when the checkpoint was written, \
             and it does not say which tensor belongs to which parameter; train again with a different path for each \
             parameter (`StageModule::parameter_path`, or `Stage::with_prefix`)"
        ),
    )
}

/// Returns the error of a tensor whose parts are not complete.
fn torn(checkpoint: &Path, tensor: &str) -> CheckpointError {
    CheckpointError::damaged(checkpoint, format!("the parts of `{tensor}` do not make up the whole tensor"))
}

/// Reads the whole file once. Returns its header if the content matches the manifest, and the elements of its
/// tensors that are not finite.
pub(super) fn verify(checkpoint: &Path, entry: &StateFile, step: u64) -> Result<Checked, CheckpointError> {
    let path = checkpoint.join(&entry.name);
    let mut file = match open_regular(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(CheckpointError::damaged(&path, "the file is missing"));
        }
        Err(source) => return Err(CheckpointError::io("open", &path)(source)),
    };
    let header = read_header(&mut file);
    let text = header.as_ref().and_then(|header| header.texts.get(STEP));
    if let Some(found) = text.and_then(|text| text.parse::<u64>().ok())
        && found != step
    {
        let reason =
            format!("the file is of step {found}, the checkpoint of step {step}; put the right file back");
        return Err(CheckpointError::unusable(&path, reason));
    }
    let found = file.metadata().map_err(CheckpointError::io("read", &path))?.len();
    if found != entry.bytes {
        let reason = format!("the file has {found} bytes of {}", entry.bytes);
        return Err(CheckpointError::damaged(&path, reason));
    }
    let other_content = || {
        let reason = "the file is damaged: its content has another hash than was written";
        CheckpointError::damaged(&path, reason)
    };
    let header = header.ok_or_else(other_content)?;
    let read = file.rewind().and_then(|()| hash_tensors(&mut file, &header));
    let (hash, flaws) = read.map_err(CheckpointError::io("read", &path))?;
    if hash.to_hex().as_str() != entry.hash {
        return Err(other_content());
    }
    Ok((header, Some(flaws)))
}
