//! Bytes in memory, or a part of an open file that is read when it is needed.
//!
//! A file is read by position and is not mapped into memory: a file that becomes shorter during a run then
//! causes an error and does not end the process, and the system's cache serves both ways.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::{DataError, FileError, TokenizedError};

/// Bytes in memory, or in a file.
#[derive(Debug)]
pub(crate) enum Bytes {
    Memory(Vec<u8>),
    File(FileBytes),
}

/// A part of an open file.
#[derive(Debug)]
pub(crate) struct FileBytes {
    path: PathBuf,
    /// Reading moves the place of the file, so one reader at a time has it.
    file: Mutex<File>,
    /// The first byte of the part.
    start: u64,
    /// The number of its bytes.
    length: usize,
    expected: Expected,
    /// Whether the hash of all bytes was compared with the expected one.
    is_verified: AtomicBool,
}

/// The properties of the content that the header of a file states.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    /// The BLAKE3 hash of all bytes.
    pub(crate) hash: blake3::Hash,
    pub(crate) largest_id: u32,
}

impl Bytes {
    /// The number of bytes that are read at a time where all of them are needed.
    const PIECE: usize = 1 << 20;

    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.len(),
            Self::File(part) => part.length,
        }
    }

    /// Passes a range of the bytes on.
    ///
    /// # Errors
    /// When the file cannot be read, or has become shorter.
    pub(crate) fn with<R>(&self, range: Range<usize>, read: impl FnOnce(&[u8]) -> R) -> Result<R, DataError> {
        match self {
            Self::Memory(bytes) => Ok(read(&bytes[range])),
            Self::File(part) => {
                let bytes = part.read(range);
                let bytes = bytes.map_err(|source| FileError::Read { path: part.path.clone(), source })?;
                Ok(read(&bytes))
            }
        }
    }

    /// Passes a range of the bytes on in pieces. All pieces but the last have a multiple of 8 bytes.
    ///
    /// # Errors
    /// As [`Bytes::with`].
    pub(crate) fn pieces(&self, range: Range<usize>, mut read: impl FnMut(&[u8])) -> Result<(), DataError> {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + Self::PIECE);
            self.with(start..end, &mut read)?;
            start = end;
        }
        Ok(())
    }

    /// Returns the BLAKE3 hash of a range.
    ///
    /// # Errors
    /// As [`Bytes::with`].
    pub(crate) fn hash(&self, range: Range<usize>) -> Result<blake3::Hash, DataError> {
        let mut hasher = blake3::Hasher::new();
        self.pieces(range, |bytes| {
            hasher.update(bytes);
        })?;
        Ok(hasher.finalize())
    }

    /// Compares the hash of all bytes of a file with the one in its header. Only the first call reads the
    /// file.
    ///
    /// # Errors
    /// When the hashes differ, and as [`Bytes::with`].
    pub(crate) fn verify(&self) -> Result<(), DataError> {
        let Self::File(part) = self else { return Ok(()) };
        if part.is_verified.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.hash(0..part.length)? != part.expected.hash {
            return Err(TokenizedError::Content { path: part.path.clone() }.into());
        }
        part.is_verified.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Checks ids that were read: none of a file is above the largest that its header states, which is below
    /// the size of the model's vocabulary. `before` returns the number of ids before them.
    ///
    /// # Errors
    /// With the first id that is above it.
    pub(crate) fn check_ids(
        &self,
        ids: impl IntoIterator<Item = u32>,
        before: impl FnOnce() -> u64,
    ) -> Result<(), DataError> {
        let Self::File(part) = self else { return Ok(()) };
        let largest = part.expected.largest_id;
        let above = (0..).zip(ids).find(|(_, id)| *id > largest);
        above.map_or(Ok(()), |(index, id)| {
            let (path, token) = (part.path.clone(), before() + index);
            Err(TokenizedError::Id { path, token, id, largest }.into())
        })
    }
}

impl FileBytes {
    /// Returns the `length` bytes of the file at `path` from `start` on.
    pub(crate) fn new(path: PathBuf, file: File, start: u64, length: usize, expected: Expected) -> Self {
        Self { path, file: Mutex::new(file), start, length, expected, is_verified: AtomicBool::new(false) }
    }

    fn read(&self, range: Range<usize>) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        // A reader that has panicked leaves no state behind: each one begins with its own place.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(self.start + range.start as u64))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}
