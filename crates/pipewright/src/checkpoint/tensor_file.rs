//! The format of a file: named tensors in the safetensors format, and named texts in its header.
//!
//! Tensors are written, hashed and dropped one at a time. Everything is little-endian.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{BoolStore, DType, TensorData};
use pipewright_system::bounded_file::create_fresh;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::error::CheckpointError;
use super::finite::NotFinite;
use crate::tensor::Value;

/// The header text that says which step a file belongs to.
pub(super) const STEP: &str = "step";

/// The header text with the loss scale and the number of updates since it changed.
pub(super) const LOSS_SCALE: &str = "loss_scale";

/// Separates the path of a parameter from the index of its shard, if a file has several shards of it.
pub(super) const INDEX: char = '#';
/// The header text with the paths of frozen parameters, as a list.
pub(super) const FROZEN: &str = "frozen";
/// The header text with the shards of the parameters that the file does not have whole, by name.
pub(super) const SHARDS: &str = "slices";

/// The header text with the rows of some parameters, by name, if the file has other rows of most parameters.
pub(super) const ROWS: &str = "rows";

/// Separates a parameter's path from the field of its optimizer state.
pub(super) const FIELD: char = '@';

/// Bytes that are written and then hashed while they are still in the cache.
const PIECE: usize = 1 << 20;
/// Bytes after which the file is synchronised with the disk. So little data is outstanding, and the count of
/// written bytes shows real progress.
const SYNC_EVERY: u64 = 64 << 20;
/// Bytes of the header's length field.
pub(super) const LENGTH_FIELD: u64 = 8;
/// The longest header that is read; the format has the same limit.
const LONGEST_HEADER: u64 = 100_000_000;

/// A tensor to be stored.
pub(super) struct Named {
    pub(super) name: String,
    pub(super) content: Content,
    pub(super) accepted: Accepted,
}

/// The numbers that a tensor may have when it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accepted {
    /// Finite numbers: the tensor is a parameter that the training changes.
    Finite,
    /// All but NaN: the training does not change the tensor, which may be a mask.
    Infinite,
    /// All: the tensor belongs to the optimizer.
    Any,
}

impl Accepted {
    fn holds(self, found: NotFinite) -> bool {
        match self {
            Self::Finite => found.is_empty(),
            Self::Infinite => found.nan == 0,
            Self::Any => true,
        }
    }
}

/// Why a file is not written.
pub(super) enum WriteError {
    /// A tensor has elements that it may not have.
    NotFinite { name: String, found: NotFinite },
    /// Another error.
    Other(CheckpointError),
}

impl From<CheckpointError> for WriteError {
    fn from(error: CheckpointError) -> Self {
        Self::Other(error)
    }
}

/// The content of a tensor, in memory or on a device.
pub(super) enum Content {
    Live(Box<Value>),
    Data(TensorData),
}

impl Content {
    fn dtype(&self) -> DType {
        match self {
            Self::Live(value) => value.dtype(),
            Self::Data(data) => data.dtype(),
        }
    }

    fn shape(&self) -> Vec<usize> {
        match self {
            Self::Live(value) => value.shape().to_vec(),
            Self::Data(data) => data.shape().to_vec(),
        }
    }

    pub(super) fn into_data(self) -> TensorData {
        match self {
            Self::Live(value) => value.into_data(),
            Self::Data(data) => data,
        }
    }
}

/// Returns the format's name of an element type.
fn to_stored(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(BoolStore::Native) => Dtype::BOOL,
        _ => return None,
    })
}

/// Returns Burn's name of a stored element type.
pub(super) fn from_stored(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        _ => return None,
    })
}

/// Returns the error of a tensor whose element type the format does not have.
pub(super) fn not_storable(tensor: &str, dtype: impl Display) -> CheckpointError {
    CheckpointError::Refused(format!(
        "`{tensor}` has elements of type {dtype}, which a checkpoint cannot hold"
    ))
}

/// Writes a file, waits until it is on disk, and returns its length and hash. `written` counts the bytes
/// during the write. Ends early at the first tensor with elements that it may not have.
pub(super) fn write(
    path: &Path,
    texts: &BTreeMap<String, String>,
    tensors: Vec<Named>,
    written: &AtomicU64,
) -> Result<(u64, blake3::Hash), WriteError> {
    let header = header(texts, &tensors)?;
    let file = create_fresh(path).map_err(CheckpointError::io("create", path))?;
    let mut sink = Sink { file, hasher: blake3::Hasher::new(), bytes: 0, unsynced: 0, written };
    sink.put(&header, |_| ()).map_err(CheckpointError::io("write", path))?;
    for Named { name, content, accepted } in tensors {
        let data = content.into_data();
        let mut found = NotFinite::default();
        let put = sink.put(data.as_bytes(), |piece| found.scan(data.dtype(), piece));
        put.map_err(CheckpointError::io("write", path))?;
        if !accepted.holds(found) {
            return Err(WriteError::NotFinite { name, found });
        }
    }
    sink.file.sync_all().map_err(CheckpointError::io("write", path))?;
    Ok((sink.bytes, sink.hasher.finalize()))
}

/// Returns the content of a file with these texts and tensors.
pub(super) fn encoded(
    texts: &BTreeMap<String, String>,
    tensors: Vec<Named>,
) -> Result<Vec<u8>, CheckpointError> {
    let mut bytes = header(texts, &tensors)?;
    tensors.into_iter().for_each(|named| bytes.extend_from_slice(named.content.into_data().as_bytes()));
    Ok(bytes)
}

/// A file that is hashed while it is written.
struct Sink<'a> {
    file: File,
    hasher: blake3::Hasher,
    bytes: u64,
    unsynced: u64,
    written: &'a AtomicU64,
}

impl Sink<'_> {
    /// Writes bytes in pieces of whole elements, and calls `look` for each piece while it is in the cache.
    fn put(&mut self, bytes: &[u8], mut look: impl FnMut(&[u8])) -> io::Result<()> {
        for piece in bytes.chunks(PIECE) {
            self.file.write_all(piece)?;
            self.hasher.update(piece);
            look(piece);
            self.bytes += piece.len() as u64;
            self.unsynced += piece.len() as u64;
            if self.unsynced >= SYNC_EVERY {
                self.file.sync_data()?;
                self.unsynced = 0;
            }
            self.written.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Returns the length field and header of a file with these tensors, in this order.
fn header(texts: &BTreeMap<String, String>, tensors: &[Named]) -> Result<Vec<u8>, CheckpointError> {
    let mut offset = 0;
    let mut infos = Vec::with_capacity(tensors.len());
    for Named { name, content, .. } in tensors {
        let dtype = content.dtype();
        let stored = to_stored(dtype).ok_or_else(|| not_storable(name, format_args!("{dtype:?}")))?;
        let shape = content.shape();
        let start = offset;
        offset += shape.iter().product::<usize>() * dtype.size();
        infos.push((name.clone(), TensorInfo { dtype: stored, shape, data_offsets: (start, offset) }));
    }
    let mut json = serde_json::to_vec(&HeaderText { texts, infos: &infos }).expect("a header is plain data");
    // Tensors start at a multiple of eight, as the format recommends.
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

/// A header as it is written, with texts and tensors in their order. The library's own writer has the texts in
/// an order that differs from process to process.
struct HeaderText<'a> {
    texts: &'a BTreeMap<String, String>,
    infos: &'a [(String, TensorInfo)],
}

impl Serialize for HeaderText<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.infos.len() + 1))?;
        map.serialize_entry("__metadata__", self.texts)?;
        self.infos.iter().try_for_each(|(name, info)| map.serialize_entry(name, info))?;
        map.end()
    }
}

/// A file's header.
pub(super) struct Header {
    /// Texts by name.
    pub(super) texts: BTreeMap<String, String>,
    /// Tensors with their offsets from `data`.
    pub(super) tensors: Vec<(String, TensorInfo)>,
    /// The offset of the first tensor in the file.
    pub(super) data: u64,
}

/// Reads the header at the beginning of `file`; returns `None` if it is not valid.
pub(super) fn read_header(file: &mut impl Read) -> Option<Header> {
    let mut field = [0; LENGTH_FIELD as usize];
    file.read_exact(&mut field).ok()?;
    let length = u64::from_le_bytes(field);
    if length > LONGEST_HEADER {
        return None;
    }
    // Reads no more than the file has, because a damaged field could ask for a huge allocation.
    let mut json = Vec::new();
    file.take(length).read_to_end(&mut json).ok()?;
    let metadata: Metadata = serde_json::from_slice(&json).ok()?;
    let texts = metadata.metadata().clone().unwrap_or_default().into_iter().collect();
    let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
    Some(Header { texts, tensors, data: LENGTH_FIELD + length })
}

/// Hashes a whole file, and returns the elements of its tensors that are not finite, by name.
pub(super) fn hash_tensors(
    mut file: impl Read,
    header: &Header,
) -> io::Result<(blake3::Hash, Vec<(String, NotFinite)>)> {
    let mut ranges: Vec<_> =
        header.tensors.iter().map(|(name, info)| (info.data_offsets, name, info)).collect();
    ranges.sort_unstable_by_key(|(offsets, ..)| *offsets);
    let mut pass = Pass { hasher: blake3::Hasher::new(), piece: vec![0; PIECE] };
    let (mut position, mut flaws) = (0, Vec::new());
    for ((start, end), name, info) in ranges {
        let (start, end) = (header.data + start as u64, header.data + end as u64);
        let Some(dtype) = from_stored(info.dtype).filter(|_| position <= start) else { continue };
        pass.read(file.by_ref().take(start - position), |_| ())?;
        let mut found = NotFinite::default();
        pass.read(file.by_ref().take(end - start), |piece| found.scan(dtype, piece))?;
        if !found.is_empty() {
            flaws.push((name.clone(), found));
        }
        position = end;
    }
    pass.read(file, |_| ())?;
    Ok((pass.hasher.finalize(), flaws))
}

/// A file that is hashed while it is read.
struct Pass {
    hasher: blake3::Hasher,
    piece: Vec<u8>,
}

impl Pass {
    /// Reads to the end, and calls `look` for each piece. Each piece but the last is full, so it has whole
    /// elements.
    fn read(&mut self, mut source: impl Read, mut look: impl FnMut(&[u8])) -> io::Result<()> {
        loop {
            let mut filled = 0;
            while filled < self.piece.len() {
                match source.read(&mut self.piece[filled..])? {
                    0 => break,
                    read => filled += read,
                }
            }
            self.hasher.update(&self.piece[..filled]);
            look(&self.piece[..filled]);
            if filled < self.piece.len() {
                return Ok(());
            }
        }
    }
}

/// Hashes the rest of a file.
pub(super) fn hash(file: impl Read) -> io::Result<blake3::Hash> {
    let mut pass = Pass { hasher: blake3::Hasher::new(), piece: vec![0; PIECE] };
    pass.read(file, |_| ())?;
    Ok(pass.hasher.finalize())
}
