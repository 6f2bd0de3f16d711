//! Token ids in as few bytes as the vocabulary allows, so that the ids of a text take no more memory than the
//! text.

use std::ops::Range;

use super::bytes::Bytes;
use crate::error::{DataError, DataPlace};

/// The number of bytes of an id. Ids are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// Up to 256 different ids.
    One,
    /// Up to 65,536 different ids.
    Two,
    /// More different ids.
    Four,
}

impl Width {
    /// Returns the width of ids below `vocab_size`.
    pub(crate) fn of(vocab_size: usize) -> Self {
        match vocab_size {
            0..=0x100 => Self::One,
            0x101..=0x1_0000 => Self::Two,
            _ => Self::Four,
        }
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    /// Appends an id, which must be below the vocabulary size.
    pub(crate) fn push(self, id: u32, bytes: &mut Vec<u8>) {
        match self {
            Self::One => bytes.push(id as u8),
            Self::Two => bytes.extend((id as u16).to_le_bytes()),
            Self::Four => bytes.extend(id.to_le_bytes()),
        }
    }

    /// Passes on the ids in whole bytes.
    pub(crate) fn each(self, bytes: &[u8], mut id: impl FnMut(u32)) {
        match self {
            Self::One => bytes.iter().for_each(|byte| id(u32::from(*byte))),
            Self::Two => {
                bytes.as_chunks().0.iter().for_each(|bytes| id(u32::from(u16::from_le_bytes(*bytes))));
            }
            Self::Four => bytes.as_chunks().0.iter().for_each(|bytes| id(u32::from_le_bytes(*bytes))),
        }
    }
}

/// Ids in memory, to which ids are appended.
#[derive(Debug)]
pub(crate) struct IdBuffer {
    width: Width,
    bytes: Vec<u8>,
}

impl IdBuffer {
    /// Makes an empty list with room for ids below `vocab_size`.
    pub(crate) fn new(vocab_size: usize) -> Self {
        Self { width: Width::of(vocab_size), bytes: Vec::new() }
    }

    /// Appends an id, which must be below the vocabulary size.
    pub(crate) fn push(&mut self, id: u32) {
        self.width.push(id, &mut self.bytes);
    }

    /// Returns the width of the ids.
    pub(crate) fn width(&self) -> Width {
        self.width
    }

    /// Returns the bytes, to which others may be appended.
    pub(crate) fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl From<IdBuffer> for Ids {
    fn from(IdBuffer { width, bytes }: IdBuffer) -> Self {
        Self::new(width, Bytes::Memory(bytes), width)
    }
}

/// Token ids that are read.
#[derive(Debug)]
pub(crate) struct Ids {
    width: Width,
    bytes: Bytes,
    /// The width in which they are hashed.
    hashed_as: Width,
}

impl Ids {
    /// Returns the ids in these bytes. A hash of them is that of the same ids with the width `hashed_as`.
    pub(crate) fn new(width: Width, bytes: Bytes, hashed_as: Width) -> Self {
        Self { width, bytes, hashed_as }
    }

    /// Returns the number of ids.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / self.width.bytes()
    }

    fn places(&self, range: &Range<usize>) -> Range<usize> {
        range.start * self.width.bytes()..range.end * self.width.bytes()
    }

    /// Passes on the ids of a range. Returns their BLAKE3 hash.
    ///
    /// # Errors
    /// When the ids cannot be read.
    pub(crate) fn hash(
        &self,
        range: &Range<usize>,
        mut id: impl FnMut(u32),
    ) -> Result<blake3::Hash, DataError> {
        let (mut hasher, mut recoded) = (blake3::Hasher::new(), Vec::new());
        self.bytes.pieces(self.places(range), |bytes| {
            self.width.each(bytes, &mut id);
            if self.width == self.hashed_as {
                hasher.update(bytes);
            } else {
                recoded.clear();
                self.width.each(bytes, |id| self.hashed_as.push(id, &mut recoded));
                hasher.update(&recoded);
            }
        })?;
        Ok(hasher.finalize())
    }

    /// Passes on the ids of a range.
    pub(crate) fn each(&self, range: &Range<usize>, mut id: impl FnMut(u32)) -> Result<(), DataError> {
        self.bytes.pieces(self.places(range), |bytes| self.width.each(bytes, &mut id))
    }

    /// Appends `count` ids from `start` on to `into`.
    ///
    /// # Errors
    /// When the ids cannot be read, or one is larger than its file states.
    pub(crate) fn copy(&self, start: usize, count: usize, into: &mut Vec<i32>) -> Result<(), DataError> {
        let first = into.len();
        into.reserve(count);
        // Ids are below a vocabulary size that fits a signed index, which every reader checks.
        let copy = |bytes: &[u8]| self.width.each(bytes, |id| into.push(id as i32));
        self.bytes.with(self.places(&(start..start + count)), copy)?;
        let ids = into[first..].iter().map(|id| id.cast_unsigned());
        self.bytes.check_ids(ids, |index| DataPlace::Token(start as u64 + index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(vocab_size: usize, bytes: usize) {
        let mut ids = IdBuffer::new(vocab_size);
        let last = u32::try_from(vocab_size - 1).expect("a small vocabulary");
        [0, last, 1].into_iter().for_each(|id| ids.push(id));
        let (mut copied, ids) = (Vec::new(), Ids::from(ids));
        ids.copy(1, 2, &mut copied).expect("it is in memory");
        assert_eq!((copied.as_slice(), ids.len()), (&[last as i32, 1][..], 3));
        assert_eq!(ids.width.bytes(), bytes);
    }

    #[test]
    fn ids_keep_their_value() {
        check(256, 1);
        check(257, 2);
        check(65_536, 2);
        check(65_537, 4);
        check(i32::MAX as usize, 4);
    }
}
