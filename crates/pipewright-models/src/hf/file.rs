//! One safetensors file, read tensor by tensor.
//!
//! The header is checked against the file's length when the file is opened, so that a truncated file is
//! reported before anything is allocated. Tensors are read by position. Memory mapping would gain nothing,
//! because every element is converted once, and the process would crash if the file shrank.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::PathBuf;

use burn::tensor::{bf16, f16};
use pipewright::bounded_file::{LFS_POINTER, open_regular};
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::error::HfError;
use super::layout::count;
use super::weight_type::WeightType;

/// The longest header that is read; the format has the same limit.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the header's length field.
const LENGTH_FIELD: u64 = 8;

#[derive(Debug)]
pub(super) struct SafetensorsFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// The offset of the first tensor.
    data: u64,
}

impl SafetensorsFile {
    pub(super) fn open(path: PathBuf) -> Result<Self, HfError> {
        let mut file = open_regular(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => HfError::MissingFile { path: path.clone() },
            _ => HfError::io("read", &path)(source),
        })?;
        let found = file.metadata().map_err(HfError::io("read", &path))?.len();
        let require = |expected: u64| {
            if found < expected {
                Err(HfError::Length { path: path.clone(), expected, found })
            } else {
                Ok(())
            }
        };

        if is_lfs_pointer(&mut file, found).map_err(HfError::io("read", &path))? {
            return Err(HfError::LfsPointer { path });
        }
        require(LENGTH_FIELD)?;
        let mut field = [0; LENGTH_FIELD as usize];
        file.read_exact(&mut field).map_err(HfError::io("read", &path))?;
        let length = u64::from_le_bytes(field);
        if length > MAX_HEADER {
            let source = serde::de::Error::custom(format!("its length would be {length} bytes"));
            return Err(HfError::Header { path, source });
        }
        let data = LENGTH_FIELD + length;
        require(data)?;

        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(HfError::io("read", &path))?;
        let metadata: Metadata = match serde_json::from_slice(&header) {
            Ok(metadata) => metadata,
            Err(source) => return Err(HfError::Header { path, source }),
        };
        let expected = data + metadata.data_len() as u64;
        if found != expected {
            return Err(HfError::Length { path, expected, found });
        }
        Ok(Self { path, file, metadata, data })
    }

    /// Returns the names of the tensors.
    pub(super) fn tensors(&self) -> Vec<String> {
        self.metadata.tensors().into_keys().collect()
    }

    /// Returns the element type and the shape of a tensor as text, followed by its first and last bytes, at
    /// most `most` each.
    pub(super) fn sample(&mut self, tensor: &str, most: usize) -> Result<Vec<u8>, HfError> {
        let Some(info) = self.metadata.info(tensor) else {
            return Err(HfError::MissingTensor { path: self.path.clone(), tensor: tensor.to_owned() });
        };
        let mut sample = format!("{} {:?}", info.dtype, info.shape).into_bytes();
        let (start, end) = info.data_offsets;
        let length = most.min(end - start);
        for offset in [start, end - length] {
            let mut bytes = vec![0; length];
            let position = SeekFrom::Start(self.data + offset as u64);
            let read = self.file.seek(position).and_then(|_| self.file.read_exact(&mut bytes));
            read.map_err(HfError::io("read", &self.path))?;
            sample.extend(bytes);
        }
        Ok(sample)
    }

    /// Returns the element type of a tensor, if it can be read.
    pub(super) fn element_type(&self, tensor: &str) -> Option<WeightType> {
        WeightType::of_dtype(self.metadata.info(tensor)?.dtype)
    }

    /// Reads the elements of `tensor`, which must have `shape`.
    pub(super) fn read(&mut self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, HfError> {
        self.read_elements(tensor, shape, 0..count(shape))
    }

    /// Like [`SafetensorsFile::read`], but reads some neighbouring elements of the tensor only.
    pub(super) fn read_elements(
        &mut self,
        tensor: &str,
        shape: &[usize],
        elements: Range<usize>,
    ) -> Result<Vec<f32>, HfError> {
        let (convert, (first, last)) = self.find(tensor, shape)?;
        let size = (last - first) / count(shape).max(1);
        let (start, end) = (first + elements.start * size, first + elements.end * size);
        let mut bytes = vec![0; end - start];
        let position = SeekFrom::Start(self.data + start as u64);
        let read = self.file.seek(position).and_then(|_| self.file.read_exact(&mut bytes));
        read.map_err(HfError::io("read", &self.path))?;
        Ok(convert(&bytes))
    }

    /// Checks that `tensor` exists with `shape` and an element type that can be read.
    pub(super) fn check(&self, tensor: &str, shape: &[usize]) -> Result<(), HfError> {
        self.find(tensor, shape).map(drop)
    }

    /// Finds the conversion of `tensor`'s elements to floats, and their position in the file.
    fn find(&self, tensor: &str, shape: &[usize]) -> Result<(Convert, (usize, usize)), HfError> {
        let (path, tensor) = (|| self.path.clone(), || tensor.to_owned());
        let Some(info) = self.metadata.info(&tensor()) else {
            return Err(HfError::MissingTensor { path: path(), tensor: tensor() });
        };
        if info.shape != shape {
            let (expected, found) = (shape.to_vec(), info.shape.clone());
            return Err(HfError::Shape { path: path(), tensor: tensor(), expected, found });
        }
        let convert: Convert = match info.dtype {
            Dtype::F32 => floats,
            Dtype::BF16 => |bytes| halves(bytes, |bits| bf16::from_bits(bits).to_f32()),
            Dtype::F16 => |bytes| halves(bytes, |bits| f16::from_bits(bits).to_f32()),
            found => return Err(HfError::ElementType { path: path(), tensor: tensor(), found }),
        };
        Ok((convert, info.data_offsets))
    }
}

/// Returns whether a file of `length` bytes is the pointer to one that Git LFS has not downloaded. Leaves the
/// file at its beginning.
fn is_lfs_pointer(file: &mut File, length: u64) -> std::io::Result<bool> {
    let mut start = [0; LFS_POINTER.len()];
    if length < start.len() as u64 {
        return Ok(false);
    }
    file.read_exact(&mut start)?;
    file.rewind()?;
    Ok(start == LFS_POINTER)
}

type Convert = fn(&[u8]) -> Vec<f32>;

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect()
}

fn halves(bytes: &[u8], convert: fn(u16) -> f32) -> Vec<f32> {
    bytes.as_chunks().0.iter().copied().map(|pair| convert(u16::from_le_bytes(pair))).collect()
}
