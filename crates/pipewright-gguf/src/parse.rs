//! Reads the header of a GGUF file: its metadata, and where its tensors are.
//!
//! Counts and lengths are compared with the bytes of the file and with limits before anything is allocated for them.

use std::collections::BTreeSet;
use std::io::{BufReader, Read};
use std::path::Path;

use pipewright_system::bounded_file::{LFS_POINTER, open_regular};
use serde_json::{Map, Number, Value};

use crate::error::GgufError;
use crate::tensor::{Tensor, TensorKind};

/// The largest header that is read. With a large vocabulary it has some 20 MB.
const LARGEST_HEADER: u64 = 1 << 28;
/// The most elements of all lists in the metadata.
const MOST_ELEMENTS: u64 = 1 << 22;
/// The most tensors.
const MOST_TENSORS: u64 = 1 << 18;
/// The most keys of the metadata.
const MOST_KEYS: u64 = 1 << 16;
/// The most sizes of a tensor.
const MOST_SIZES: u32 = 4;
/// The largest distance of the starts of two tensors.
const LARGEST_ALIGNMENT: u64 = 1 << 20;
/// The advice for a damaged file.
const AGAIN: &str = "copy or download it again";

/// The numbers of the types of values in the metadata.
const TEXT: u32 = 8;
const LIST: u32 = 9;

/// Reads the header of a file.
pub(crate) fn header(path: &Path) -> Result<(Map<String, Value>, Vec<Tensor>), GgufError> {
    let file = open_regular(path).map_err(GgufError::io(path))?;
    let length = file.metadata().map_err(GgufError::io(path))?.len();
    let mut header =
        Header { path, length, read: 0, elements: 0, from: BufReader::with_capacity(1 << 16, file) };
    header.parse()
}

struct Header<'a, R> {
    path: &'a Path,
    length: u64,
    /// The bytes that were read.
    read: u64,
    /// The elements of lists that were read.
    elements: u64,
    from: R,
}

impl<R: Read> Header<'_, R> {
    fn fault(&self, fault: impl Into<String>) -> GgufError {
        GgufError::at(self.path, fault)
    }

    fn parse(&mut self) -> Result<(Map<String, Value>, Vec<Tensor>), GgufError> {
        let magic = self.bytes(4)?;
        if magic != b"GGUF" {
            let is_pointer = LFS_POINTER.starts_with(&magic);
            let advice = if is_pointer { "run `git lfs pull` in its folder, or download it" } else { AGAIN };
            return Err(self.fault(format!("the file does not begin with `GGUF`: {advice}")));
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            let fault = format!(
                "the file has version {version} of GGUF; versions 2 and 3 of little-endian machines are read"
            );
            return Err(self.fault(fault));
        }
        let (tensors, keys) = (self.u64()?, self.u64()?);
        if tensors > MOST_TENSORS || keys > MOST_KEYS {
            let fault =
                format!("the header announces {tensors} tensors and {keys} keys, which is too many: {AGAIN}");
            return Err(self.fault(fault));
        }
        let mut metadata = Map::new();
        for _ in 0..keys {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self.value(&key, kind)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(self.fault(format!("the key `{key}` exists twice: {AGAIN}")));
            }
        }
        let mut found = Vec::new();
        for _ in 0..tensors {
            found.push(self.tensor()?);
        }
        let alignment = metadata.get("general.alignment").map_or(Some(32), Value::as_u64);
        let Some(alignment) = alignment.filter(|size| size.is_power_of_two() && *size <= LARGEST_ALIGNMENT)
        else {
            return Err(self.fault(format!("`general.alignment` is not a power of two: {AGAIN}")));
        };
        let data = self.read.next_multiple_of(alignment);
        let mut names = BTreeSet::new();
        for tensor in &mut found {
            let name = &tensor.name;
            if !names.insert(name.clone()) {
                return Err(self.fault(format!("tensor `{name}` exists twice: {AGAIN}")));
            }
            let end = tensor.start.checked_add(data).and_then(|start| start.checked_add(tensor.bytes));
            if !tensor.start.is_multiple_of(alignment) || end.is_none_or(|end| end > self.length) {
                let (start, bytes, all) = (tensor.start, tensor.bytes, self.length);
                let fault = format!(
                    "tensor `{name}` would have {bytes} bytes from byte {start} of the tensors on, and the file has {all} \
                     bytes: {AGAIN}"
                );
                return Err(self.fault(fault));
            }
            tensor.start += data;
        }
        let mut in_order: Vec<&Tensor> = found.iter().collect();
        in_order.sort_by_key(|tensor| tensor.start);
        let overlap = in_order.array_windows().find(|[one, next]| one.start + one.bytes > next.start);
        if let Some([one, next]) = overlap {
            let fault = format!("tensors `{}` and `{}` have the same bytes: {AGAIN}", one.name, next.name);
            return Err(self.fault(fault));
        }
        Ok((metadata, found))
    }

    /// Reads the description of a tensor. Its start counts from the first tensor.
    fn tensor(&mut self) -> Result<Tensor, GgufError> {
        let name = self.text()?;
        let sizes = self.u32()?;
        if !(1..=MOST_SIZES).contains(&sizes) {
            return Err(
                self.fault(format!("tensor `{name}` has {sizes} sizes; at most {MOST_SIZES} are read"))
            );
        }
        let mut shape = Vec::new();
        for _ in 0..sizes {
            shape.push(self.u64()?);
        }
        let kind = self.u32()?;
        let Some(kind) = TensorKind::of_number(kind) else {
            let fault = format!(
                "tensor `{name}` has the element type {kind}, which is not read; {} are: use a file of these types",
                TensorKind::names()
            );
            return Err(self.fault(fault));
        };
        let [elements, bytes] = kind.block().map(|size| size as u64);
        let count = shape.iter().try_fold(1u64, |count, size| count.checked_mul(*size));
        let count = count.filter(|count| *count > 0 && shape[0].is_multiple_of(elements));
        let Some(bytes) = count.and_then(|count| (count / elements).checked_mul(bytes)) else {
            let fault = format!(
                "tensor `{name}` has the sizes {shape:?}, which are not whole blocks of {elements}: {AGAIN}"
            );
            return Err(self.fault(fault));
        };
        let start = self.u64()?;
        // The first size is of neighbouring elements.
        let shape = shape.into_iter().rev().map(|size| size as usize).collect();
        Ok(Tensor { name, kind, shape, start, bytes })
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<Value, GgufError> {
        Ok(match kind {
            0 => self.array::<1>()?[0].into(),
            1 => i8::from_le_bytes(self.array()?).into(),
            2 => u16::from_le_bytes(self.array()?).into(),
            3 => i16::from_le_bytes(self.array()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.array()?).into(),
            // The shortest decimal number is what a `config.json` would have.
            6 => float(f32::from_le_bytes(self.array()?).to_string()),
            7 => (self.array::<1>()?[0] != 0).into(),
            TEXT => self.text()?.into(),
            LIST => {
                let kind = self.u32()?;
                let count = self.u64()?;
                self.elements = self.elements.saturating_add(count);
                if kind == LIST || self.elements > MOST_ELEMENTS || count > self.length {
                    let fault = format!(
                        "the key `{key}` announces {count} elements, or lists in a list, which is not read: {AGAIN}"
                    );
                    return Err(self.fault(fault));
                }
                let mut list = Vec::new();
                for _ in 0..count {
                    list.push(self.value(key, kind)?);
                }
                list.into()
            }
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.array()?).into(),
            12 => float(f64::from_le_bytes(self.array()?).to_string()),
            _ => {
                return Err(
                    self.fault(format!("the key `{key}` has a value of the unknown type {kind}: {AGAIN}"))
                );
            }
        })
    }

    fn text(&mut self) -> Result<String, GgufError> {
        let length = self.u64()?;
        let bytes = self.bytes(length)?;
        String::from_utf8(bytes).map_err(|_| {
            self.fault(format!("a text before byte {} of the header is not UTF-8: {AGAIN}", self.read))
        })
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Counts bytes before they are read.
    fn count(&mut self, bytes: u64) -> Result<(), GgufError> {
        self.read = self.read.saturating_add(bytes);
        if self.read <= self.length.min(LARGEST_HEADER) {
            return Ok(());
        }
        let all = self.length;
        Err(self.fault(format!("the file has {all} bytes, and its header is longer: {AGAIN}")))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        self.count(N as u64)?;
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes).map_err(GgufError::io(self.path))?;
        Ok(bytes)
    }

    fn bytes(&mut self, length: u64) -> Result<Vec<u8>, GgufError> {
        self.count(length)?;
        let mut bytes = vec![0; length as usize];
        self.from.read_exact(&mut bytes).map_err(GgufError::io(self.path))?;
        Ok(bytes)
    }
}

/// Returns a number, or null if it is not finite.
fn float(text: String) -> Value {
    text.parse().ok().and_then(Number::from_f64).map_or(Value::Null, Value::Number)
}
