//! One file with weights, in safetensors or GGUF, read tensor by tensor.
//!
//! The header is checked against the file's length when the file is opened, so that a truncated file is
//! reported before anything is allocated. Tensors are read by position. Memory mapping would gain nothing,
//! because every element is converted once, and the process would crash if the file shrank.

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::{bf16, f16};
use pipewright::bounded_file::{LFS_POINTER, open_regular};
use pipewright_gguf::{FamilyTensor, TensorKind};
use pipewright_kernel::quantised::{BlockKind, Blocks, CodebookError, Form, QuantisedMatrix};
use pipewright_system::direct_file::DirectFile;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::json_file::lfs_pointer;
use super::layout::count;
use super::weight_type::WeightType;
use crate::error::ModelError;

/// The longest header that is read; the format has the same limit.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the header's length field.
const LENGTH_FIELD: u64 = 8;

#[derive(Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    file: File,
    tensors: HashMap<String, TensorInfo>,
    /// Further facts about the tensors of a GGUF file.
    in_gguf: HashMap<String, FamilyTensor>,
    /// The offset of the first tensor.
    data: u64,
    /// Present if tensors are read past the page cache.
    direct: Option<DirectFile>,
}

impl WeightFile {
    pub(super) fn open(path: PathBuf) -> Result<Self, ModelError> {
        let mut file = open_regular(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => ModelError::new(format!(
                "{} is missing, and the index in its folder names it: copy or download it again",
                path.display()
            )),
            _ => ModelError::io("read", &path)(source),
        })?;
        let found = file.metadata().map_err(ModelError::io("read", &path))?.len();
        let cut_short = |expected: u64| {
            let fault = "copy or download it again";
            let fault = format!("the file has {found} bytes, and its header asks for {expected}; {fault}");
            ModelError::at(&path, fault)
        };
        let require = |expected: u64| if found < expected { Err(cut_short(expected)) } else { Ok(()) };

        if is_lfs_pointer(&mut file, found).map_err(ModelError::io("read", &path))? {
            return Err(lfs_pointer(&path));
        }
        require(LENGTH_FIELD)?;
        let mut field = [0; LENGTH_FIELD as usize];
        file.read_exact(&mut field).map_err(ModelError::io("read", &path))?;
        let length = u64::from_le_bytes(field);
        if length > MAX_HEADER {
            return Err(bad_header(&path, format!("its length would be {length} bytes")));
        }
        let data = LENGTH_FIELD + length;
        require(data)?;

        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(ModelError::io("read", &path))?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|source| bad_header(&path, source))?;
        let expected = data + metadata.data_len() as u64;
        if found != expected {
            return Err(cut_short(expected));
        }
        let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        Ok(Self { path, file, tensors, in_gguf: HashMap::new(), data, direct: None })
    }

    /// Opens a GGUF file with these tensors.
    pub(super) fn open_gguf(path: PathBuf, tensors: Vec<FamilyTensor>) -> Result<Self, ModelError> {
        let file = open_regular(&path).map_err(ModelError::io("read", &path))?;
        let info = |tensor: &FamilyTensor| TensorInfo {
            dtype: match tensor.kind {
                TensorKind::F32 => Dtype::F32,
                TensorKind::F16 => Dtype::F16,
                TensorKind::Bf16 => Dtype::BF16,
                TensorKind::Blocks(_) => Dtype::U8,
            },
            shape: tensor.shape.clone(),
            data_offsets: (tensor.start as usize, (tensor.start + tensor.bytes) as usize),
        };
        let infos = tensors.iter().map(|tensor| (tensor.name.clone(), info(tensor))).collect();
        let in_gguf = tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        Ok(Self { path, file, tensors: infos, in_gguf, data: 0, direct: None })
    }

    /// Returns the form of a tensor in blocks.
    pub(super) fn blocks_of(&self, tensor: &str) -> Option<BlockKind> {
        match self.in_gguf.get(tensor)?.kind {
            TensorKind::Blocks(kind) => Some(kind),
            _ => None,
        }
    }

    /// Returns the rows of a tensor in the order of the family, if the file has another one.
    pub(super) fn rows_of(&self, tensor: &str) -> Option<&[usize]> {
        self.in_gguf.get(tensor)?.rows.as_deref()
    }

    /// Returns the file, whose tensors are read past the page cache.
    pub(super) fn reading_directly(self) -> Result<Self, ModelError> {
        let direct = DirectFile::open(&self.path).map_err(ModelError::io("read", &self.path))?;
        Ok(Self { direct: Some(direct), ..self })
    }

    fn read_range(&mut self, range: Range<u64>) -> Result<Vec<u8>, ModelError> {
        let read = match &mut self.direct {
            Some(direct) => direct.read(range),
            None => {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                let position = SeekFrom::Start(range.start);
                let read = self.file.seek(position).and_then(|_| self.file.read_exact(&mut bytes));
                read.map(|()| bytes)
            }
        };
        read.map_err(ModelError::io("read", &self.path))
    }

    /// Returns the names of the tensors.
    pub(super) fn tensors(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    /// Returns the element type and the shape of a tensor as text, followed by its first and last bytes, at
    /// most `most` each.
    pub(super) fn sample(&mut self, tensor: &str, most: usize) -> Result<Vec<u8>, ModelError> {
        let info = self.tensors.get(tensor).ok_or_else(|| missing_tensor(&self.path, tensor))?;
        let mut sample = format!("{} {:?}", info.dtype, info.shape).into_bytes();
        sample
            .extend(self.blocks_of(tensor).map(|kind| format!(" {kind:?}")).unwrap_or_default().into_bytes());
        for range in self.ends_of(tensor, most)? {
            sample.extend(self.read_range(range)?);
        }
        Ok(sample)
    }

    /// Returns the positions of the first and last bytes of a tensor, at most `most` each.
    pub(super) fn ends_of(&self, tensor: &str, most: usize) -> Result<[Range<u64>; 2], ModelError> {
        let info = self.tensors.get(tensor).ok_or_else(|| missing_tensor(&self.path, tensor))?;
        let (start, end) = info.data_offsets;
        let length = most.min(end - start);
        let range = |offset: usize| self.data + offset as u64..self.data + (offset + length) as u64;
        Ok([range(start), range(end - length)])
    }

    /// Returns the shape of a tensor.
    pub(super) fn shape_of(&self, tensor: &str) -> Option<&[usize]> {
        Some(&self.tensors.get(tensor)?.shape)
    }

    /// Returns the element type of a tensor, if it can be read.
    pub(super) fn element_type(&self, tensor: &str) -> Option<WeightType> {
        WeightType::of_dtype(self.tensors.get(tensor)?.dtype)
    }

    /// Returns the number of bytes of a tensor of any element type.
    pub(super) fn bytes_of(&self, tensor: &str) -> Option<usize> {
        let (start, end) = self.tensors.get(tensor)?.data_offsets;
        Some(end - start)
    }

    /// Returns the element type, the shape and the number of bytes of a tensor.
    pub(super) fn describe(&self, tensor: &str) -> Option<(Dtype, Vec<usize>, usize)> {
        let info = self.tensors.get(tensor)?;
        Some((info.dtype, info.shape.clone(), info.data_offsets.1 - info.data_offsets.0))
    }

    /// Reads the bytes of a tensor, whatever its element type and shape.
    pub(super) fn read_bytes(&mut self, tensor: &str) -> Result<Vec<u8>, ModelError> {
        let range = self.place_of(tensor)?;
        self.read_range(range)
    }

    /// Reads some neighbouring bytes of a tensor, whatever its element type and shape.
    pub(super) fn read_bytes_of(&mut self, tensor: &str, part: Range<usize>) -> Result<Vec<u8>, ModelError> {
        let whole = self.place_of(tensor)?;
        assert!(part.end as u64 <= whole.end - whole.start, "the tensor has these bytes");
        self.read_range(whole.start + part.start as u64..whole.start + part.end as u64)
    }

    /// Returns the position of a whole tensor in the file.
    pub(super) fn place_of(&self, tensor: &str) -> Result<Range<u64>, ModelError> {
        let info = self.tensors.get(tensor).ok_or_else(|| missing_tensor(&self.path, tensor))?;
        let (start, end) = info.data_offsets;
        Ok(self.data + start as u64..self.data + end as u64)
    }

    /// Reads the elements of `tensor`, which must have `shape`.
    pub(super) fn read(&mut self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        self.read_elements(tensor, shape, 0..count(shape))
    }

    /// Like [`WeightFile::read`], but reads some neighbouring elements of the tensor only.
    pub(super) fn read_elements(
        &mut self,
        tensor: &str,
        shape: &[usize],
        elements: Range<usize>,
    ) -> Result<Vec<f32>, ModelError> {
        let (convert, _) = self.find(tensor, shape)?;
        let range = self.range_of(tensor, shape, elements.clone())?;
        let bytes = self.read_range(range)?;
        let mut values = convert.values(&bytes).map_err(|fault| {
            ModelError::at(&self.path, format!("tensor `{tensor}`: copy or download the file again"))
                .because(fault)
        })?;
        let Some(in_gguf) = self.in_gguf.get(tensor) else { return Ok(values) };
        if let Some(rows) = &in_gguf.rows {
            let width = values.len() / rows.len().max(1);
            let ordered = rows.iter().flat_map(|&row| &values[row * width..][..width]).copied();
            values = ordered.skip(elements.start).take(elements.len()).collect();
        }
        values.iter_mut().for_each(|value| *value -= in_gguf.offset);
        Ok(values)
    }

    /// Returns the position of some neighbouring elements of `tensor`, which must have `shape`, in the file: of all
    /// elements if the rows have another order there. Elements in blocks must be whole blocks.
    pub(super) fn range_of(
        &self,
        tensor: &str,
        shape: &[usize],
        elements: Range<usize>,
    ) -> Result<Range<u64>, ModelError> {
        let (_, (first, last)) = self.find(tensor, shape)?;
        let elements = if self.rows_of(tensor).is_some() { 0..count(shape) } else { elements };
        let (bytes, all) = ((last - first) as u128, count(shape).max(1) as u128);
        let position = |element: usize| self.data + first as u64 + (element as u128 * bytes / all) as u64;
        Ok(position(elements.start)..position(elements.end))
    }

    /// Checks that `tensor` exists with `shape` and an element type that can be read.
    pub(super) fn check(&self, tensor: &str, shape: &[usize]) -> Result<(), ModelError> {
        self.find(tensor, shape).map(drop)
    }

    /// Finds the conversion of `tensor`'s elements to floats, and their position in the file.
    fn find(&self, tensor: &str, shape: &[usize]) -> Result<(Convert, (usize, usize)), ModelError> {
        let info = self.tensors.get(tensor).ok_or_else(|| missing_tensor(&self.path, tensor))?;
        if info.shape != shape {
            let found = &info.shape;
            let fault = format!(
                "tensor `{tensor}` has shape {found:?}, and the configuration asks for {shape:?}{}",
                advice_on_order(shape, found)
            );
            return Err(ModelError::at(&self.path, fault));
        }
        let convert = match info.dtype {
            Dtype::F32 => Convert::Each(floats),
            Dtype::BF16 => Convert::Each(|bytes| halves(bytes, |bits| bf16::from_bits(bits).to_f32())),
            Dtype::F16 => Convert::Each(|bytes| halves(bytes, |bits| f16::from_bits(bits).to_f32())),
            found => {
                if let Some(kind) = self.blocks_of(tensor) {
                    return Ok((Convert::Blocks(kind), info.data_offsets));
                }
                let advice = "convert it to F32, BF16 or F16";
                let fault = format!("tensor `{tensor}` has element type {found:?}; {advice}");
                return Err(ModelError::at(&self.path, fault));
            }
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

/// Returns the error of a tensor that a file, or the files of an index, do not have.
pub(super) fn missing_tensor(path: &Path, tensor: &str) -> ModelError {
    ModelError::at(path, format!("tensor `{tensor}` is missing"))
}

/// Returns the error of a file whose beginning is not a header.
pub(super) fn bad_header(path: &Path, cause: impl Into<Box<dyn Error + Send + Sync>>) -> ModelError {
    ModelError::at(path, "the file does not begin with a safetensors header").because(cause)
}

/// Refuses values that training cannot start from.
pub(super) fn require_finite(path: &Path, tensor: &str, values: Vec<f32>) -> Result<Vec<f32>, ModelError> {
    let Some(value) = values.iter().find(|value| !value.is_finite()) else { return Ok(values) };
    let fault = format!("tensor `{tensor}` has the value {value}, which is not finite");
    Err(ModelError::at(path, format!("{fault}: copy or download the weights again")))
}

/// Returns advice on a tensor of all experts whose dimensions have another order.
fn advice_on_order(expected: &[usize], found: &[usize]) -> &'static str {
    let sorted = |shape: &[usize]| {
        let mut shape = shape.to_vec();
        shape.sort_unstable();
        shape
    };
    if expected.len() != 3 || sorted(expected) != sorted(found) {
        return "";
    }
    ", in this order: load the model with transformers, and write it with `model.save_pretrained(DIR, save_original_format=False)`"
}

/// How the bytes of a tensor become elements.
enum Convert {
    Each(fn(&[u8]) -> Vec<f32>),
    Blocks(BlockKind),
}

impl Convert {
    fn values(&self, bytes: &[u8]) -> Result<Vec<f32>, CodebookError> {
        match self {
            Self::Each(convert) => Ok(convert(bytes)),
            Self::Blocks(kind) => {
                let columns = bytes.len() / kind.bytes() * kind.elements();
                let blocks = Blocks::new(*kind, [1, columns], bytes.to_vec())?;
                Ok(QuantisedMatrix::new(1, Form::Blocks(blocks)).decoded())
            }
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect()
}

fn halves(bytes: &[u8], convert: fn(u16) -> f32) -> Vec<f32> {
    bytes.as_chunks().0.iter().copied().map(|pair| convert(u16::from_le_bytes(pair))).collect()
}
