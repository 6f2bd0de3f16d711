//! Bytes in memory, or a part of an open file that is read when it is needed.
//!
//! A file is read by position and is not mapped into memory: a file that becomes shorter during a run then
//! causes an error and does not end the process, and the system's cache serves both ways.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{DataError, DataPlace};

/// The number of bytes of a block of a file. Each block has a hash of its own, and is read as a whole where
/// all bytes are needed.
pub(crate) const BLOCK: usize = 1 << 20;

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
    file: File,
    /// The first byte of the part.
    start: u64,
    /// The number of its bytes.
    length: usize,
    blocks: Vec<Block>,
    /// The largest id that the header of the file states.
    largest_id: u32,
}

/// A block of a file.
#[derive(Debug)]
struct Block {
    /// The BLAKE3 hash that was written.
    hash: blake3::Hash,
    /// Whether the bytes were compared with it.
    is_verified: AtomicBool,
}

impl Bytes {
    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.len(),
            Self::File(part) => part.length,
        }
    }

    /// Passes a range of the bytes on. A block of a file is compared with its hash when a byte of it is read
    /// for the first time.
    ///
    /// # Errors
    /// When the file cannot be read, has become shorter, or is not the one that was written.
    pub(crate) fn with<R>(&self, range: Range<usize>, read: impl FnOnce(&[u8]) -> R) -> Result<R, DataError> {
        match self {
            Self::Memory(bytes) => Ok(read(&bytes[range])),
            Self::File(part) => Ok(read(&part.read(range)?)),
        }
    }

    /// Passes a range of the bytes on in pieces. Each ends at the end of a block or of the range.
    ///
    /// # Errors
    /// As [`Bytes::with`].
    pub(crate) fn pieces(&self, range: Range<usize>, mut read: impl FnMut(&[u8])) -> Result<(), DataError> {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min((start / BLOCK + 1) * BLOCK);
            self.with(start..end, &mut read)?;
            start = end;
        }
        Ok(())
    }

    /// Checks ids that were read: none of a file is above the largest that its header states, which is below
    /// the size of the model's vocabulary. `place` returns the place of the id with this index.
    ///
    /// # Errors
    /// With the first id that is above it.
    pub(crate) fn check_ids(
        &self,
        ids: impl IntoIterator<Item = u32>,
        place: impl FnOnce(u64) -> DataPlace,
    ) -> Result<(), DataError> {
        let Self::File(part) = self else { return Ok(()) };
        let largest = part.largest_id;
        let above = (0..).zip(ids).find(|(_, id)| *id > largest);
        above.map_or(Ok(()), |(index, id)| {
            let problem = format!(
                "the file is damaged: {} has the id {id}, and the largest in its header is {largest}; copy the file or tokenize \
                 the data again",
                place(index)
            );
            Err(DataError::of(&part.path, problem))
        })
    }
}

impl FileBytes {
    /// Returns the `length` bytes of the file at `path` from `start` on. `hashes` has the hash of each block.
    pub(crate) fn new(
        path: PathBuf,
        file: File,
        (start, length): (u64, usize),
        hashes: impl IntoIterator<Item = blake3::Hash>,
        largest_id: u32,
    ) -> Self {
        let block = |hash| Block { hash, is_verified: AtomicBool::new(false) };
        let blocks = hashes.into_iter().map(block).collect();
        Self { path, file, start, length, blocks, largest_id }
    }

    fn read(&self, range: Range<usize>) -> Result<Vec<u8>, DataError> {
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let touched = &self.blocks[blocks.clone()];
        if touched.iter().all(|block| block.is_verified.load(Ordering::Relaxed)) {
            return self.read_unverified(range);
        }
        let start = blocks.start * BLOCK;
        let mut bytes = self.read_unverified(start..self.length.min(blocks.end * BLOCK))?;
        for (block, content) in touched.iter().zip(bytes.chunks(BLOCK)) {
            if blake3::hash(content) != block.hash {
                return Err(other_content(&self.path));
            }
            block.is_verified.store(true, Ordering::Relaxed);
        }
        bytes.truncate(range.end - start);
        bytes.drain(..range.start - start);
        Ok(bytes)
    }

    fn read_unverified(&self, range: Range<usize>) -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; range.len()];
        read_exact_at(&self.file, &mut bytes, self.start + range.start as u64)
            .map_err(|source| DataError::unreadable(&self.path, source))?;
        Ok(bytes)
    }
}

/// Returns the error of a file whose content is not what was written.
pub(crate) fn other_content(path: &Path) -> DataError {
    let problem = "the file is damaged: its token ids do not have the hash that was written with them; copy the file or \
                   tokenize the data again";
    DataError::of(path, problem)
}

/// Fills `bytes` with the bytes of a file from `place` on. Several threads may read at the same time.
#[cfg(unix)]
fn read_exact_at(file: &File, bytes: &mut [u8], place: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, place)
}

/// Fills `bytes` with the bytes of a file from `place` on. Several threads may read at the same time.
#[cfg(windows)]
fn read_exact_at(file: &File, mut bytes: &mut [u8], mut place: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, place) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => (bytes, place) = (&mut bytes[count..], place + count as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
