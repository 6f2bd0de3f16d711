//! Writes the header of a GGUF file of version 3.

use crate::tensor::TensorKind;

/// The distance of the starts of tensors is a multiple of so many bytes.
const ALIGNMENT: u64 = 32;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names are the types")]
pub enum Entry {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Floats(Vec<f32>),
    Ints(Vec<i32>),
}

impl Entry {
    fn write(&self, to: &mut Vec<u8>) {
        fn list<T>(to: &mut Vec<u8>, kind: u32, values: &[T], write: impl Fn(&mut Vec<u8>, &T)) {
            to.extend(kind.to_le_bytes());
            to.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| write(to, value));
        }
        let kind: u32 = match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::Texts(_) | Self::Floats(_) | Self::Ints(_) => 9,
        };
        to.extend(kind.to_le_bytes());
        match self {
            Self::U32(value) => to.extend(value.to_le_bytes()),
            Self::F32(value) => to.extend(value.to_le_bytes()),
            Self::Bool(value) => to.push((*value).into()),
            Self::Text(value) => text(value, to),
            Self::Texts(values) => list(to, 8, values, |to, value| text(value, to)),
            Self::Floats(values) => list(to, 6, values, |to, value| to.extend(value.to_le_bytes())),
            Self::Ints(values) => list(to, 5, values, |to, value| to.extend(value.to_le_bytes())),
        }
    }
}

fn text(value: &str, to: &mut Vec<u8>) {
    to.extend((value.len() as u64).to_le_bytes());
    to.extend(value.as_bytes());
}

/// Returns the number of zeros after so many bytes of a header or a tensor.
pub fn padding(bytes: u64) -> usize {
    (bytes.next_multiple_of(ALIGNMENT) - bytes) as usize
}

/// Returns the header of a file with these tensors, which follow each other, each with its [`padding`].
pub fn header(metadata: &[(String, Entry)], tensors: &[(String, TensorKind, Vec<usize>)]) -> Vec<u8> {
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.len() as u64).to_le_bytes());
    for (key, entry) in metadata {
        text(key, &mut header);
        entry.write(&mut header);
    }
    let mut start = 0u64;
    for (name, kind, shape) in tensors {
        text(name, &mut header);
        header.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|size| header.extend((*size as u64).to_le_bytes()));
        header.extend(kind.number().to_le_bytes());
        header.extend(start.to_le_bytes());
        start += kind.bytes(shape).next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len() + padding(header.len() as u64), 0);
    header
}
