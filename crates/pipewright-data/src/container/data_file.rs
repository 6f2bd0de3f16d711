//! Opens data files, which may be compressed, as streams of their content.
//!
//! The name and the first bytes must agree: a file is gzip or zstd if its name ends in `.gz` or `.zst` and
//! its content begins as the format does.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;
use pipewright_system::bounded_file::open_regular;
use serde::Serialize;

use crate::container::zstd_frames::ZstdFrames;
use crate::error::DataError;
use crate::memory_budget::MemoryBudget;

/// The bytes of a file that are looked at to recognise it.
const HEAD: usize = 1 << 16;

/// An open data file.
pub(crate) struct DataFile {
    path: PathBuf,
    packing: Packing,
    content: BufReader<Box<dyn Read>>,
}

impl DataFile {
    /// Opens a file.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        Self::open_counted(path, &ReadBytes::default())
    }

    /// Opens a file, and adds the bytes that are read from it to `read`.
    pub(crate) fn open_counted(path: &Path, read: &ReadBytes) -> Result<Self, DataError> {
        let unreadable = |source| DataError::unreadable(path, source);
        let file = Counted { reader: open_regular(path).map_err(unreadable)?, read: read.clone() };
        let mut file = BufReader::with_capacity(HEAD, file);
        let packing = Packing::of_name(path);
        if !packing.begins(file.fill_buf().map_err(unreadable)?) {
            let problem =
                format!("the name says that the file is {packing}, and its content is not; rename it");
            return Err(DataError::of(path, problem));
        }
        let mut content: Box<dyn Read> = match packing {
            Packing::Plain => Box::new(file),
            Packing::Gzip => Box::new(MultiGzDecoder::new(file)),
            Packing::Zstd => Box::new(ZstdFrames::new(file)),
        };
        // A decoder may return little at a time, such as a short first member of several.
        let mut head = Vec::new();
        let read = content.by_ref().take(HEAD as u64).read_to_end(&mut head);
        read.map_err(|source| failed(path, packing, source))?;
        let content: Box<dyn Read> = Box::new(io::Cursor::new(head).chain(content));
        Ok(Self { path: path.to_owned(), packing, content: BufReader::with_capacity(HEAD, content) })
    }

    /// Returns the path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns how the file is compressed.
    pub(crate) fn packing(&self) -> Packing {
        self.packing
    }

    /// Returns the ending of the name, in lower case, without the ending of the packing.
    pub(crate) fn ending(&self) -> Option<String> {
        let path = match self.packing {
            Packing::Plain => self.path.as_path(),
            Packing::Gzip | Packing::Zstd => Path::new(self.path.file_stem()?),
        };
        Some(path.extension()?.to_str()?.to_lowercase())
    }

    /// Returns the next bytes of the content, as many as are buffered; before anything is read, the first
    /// [`HEAD`] bytes.
    pub(crate) fn head(&mut self) -> Result<&[u8], DataError> {
        // Borrows end with the error, which needs the path.
        if let Err(source) = self.content.fill_buf() {
            return Err(self.failed(source));
        }
        Ok(self.content.buffer())
    }

    /// Passes over bytes of [`DataFile::head`].
    pub(crate) fn consume(&mut self, bytes: usize) {
        self.content.consume(bytes);
    }

    fn failed(&self, source: io::Error) -> DataError {
        failed(&self.path, self.packing, source)
    }

    /// Reads a line with its end, or up to `limit + 1` bytes of it, into `line`. Returns the number of bytes;
    /// 0 at the end of the file.
    pub(crate) fn read_line(&mut self, limit: u64, line: &mut Vec<u8>) -> Result<u64, DataError> {
        line.clear();
        let read = self.content.by_ref().take(limit.saturating_add(1)).read_until(b'\n', line);
        read.map(|bytes| bytes as u64).map_err(|source| self.failed(source))
    }

    /// Fills `bytes`.
    pub(crate) fn read_exact(&mut self, bytes: &mut [u8]) -> Result<(), DataError> {
        self.content.read_exact(bytes).map_err(|source| self.failed(source))
    }

    /// Replaces the content of `bytes` with the next `count` bytes, or with as many as there are.
    pub(crate) fn read_up_to(&mut self, count: u64, bytes: &mut Vec<u8>) -> Result<usize, DataError> {
        bytes.clear();
        let read = self.content.by_ref().take(count).read_to_end(bytes);
        read.map_err(|source| self.failed(source))
    }

    /// Appends the rest of the content to `bytes`, if the budget has room for it.
    pub(crate) fn append(&mut self, bytes: &mut Vec<u8>, budget: &MemoryBudget) -> Result<(), DataError> {
        if self.packing == Packing::Plain {
            self.reserve(bytes, budget)?;
        }
        // A file may be longer than the system reports, such as a file in /proc.
        let read = self.content.by_ref().take(budget.left().saturating_add(1)).read_to_end(bytes);
        let read = read.map_err(|source| self.failed(source))?;
        budget.require(&self.path, read as u64)
    }

    /// Makes room for a file of the size that the system reports.
    fn reserve(&self, bytes: &mut Vec<u8>, budget: &MemoryBudget) -> Result<(), DataError> {
        let size = std::fs::metadata(&self.path).map_err(|source| self.failed(source))?.len();
        budget.require(&self.path, size)?;
        // Growing by a half at a time avoids copying the bytes of earlier files for every further file.
        let room = usize::try_from(size).ok().map(|size| size.max(bytes.len() / 2));
        if bytes.capacity() - bytes.len() < usize::try_from(size).unwrap_or(usize::MAX) {
            let reserved = room.is_some_and(|room| bytes.try_reserve_exact(room).is_ok());
            if !reserved {
                return Err(budget.exceeded(&self.path, size));
            }
        }
        Ok(())
    }
}

/// Returns the error of a read: a compressed file is damaged, and others are unreadable.
fn failed(path: &Path, packing: Packing, source: io::Error) -> DataError {
    if packing == Packing::Plain {
        return DataError::unreadable(path, source);
    }
    let problem = format!(
        "the {packing} file is damaged or ends early, so nothing of it is used; copy or download it again"
    );
    DataError::of(path, problem).caused_by(source)
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// It is not.
    Plain,
    /// gzip, with a name that ends in `.gz`.
    Gzip,
    /// zstd, with a name that ends in `.zst`.
    Zstd,
}

impl Packing {
    /// Returns the packing that a name ends with.
    pub(crate) fn of_name(path: &Path) -> Self {
        match path.extension().and_then(OsStr::to_str) {
            Some("gz") => Self::Gzip,
            Some("zst") => Self::Zstd,
            _ => Self::Plain,
        }
    }

    /// Returns whether content that begins with `head` can have the packing.
    pub(crate) fn begins(self, head: &[u8]) -> bool {
        match self {
            Self::Plain => true,
            Self::Gzip => head.starts_with(b"\x1f\x8b"),
            // A frame, or one that decoders skip.
            Self::Zstd => {
                head.starts_with(b"\x28\xb5\x2f\xfd")
                    || (head.get(1..4) == Some(b"\x2a\x4d\x18") && head[0] & 0xf0 == 0x50)
            }
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        })
    }
}

/// The number of bytes that were read. A clone shares it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadBytes(Arc<AtomicU64>);

impl ReadBytes {
    /// Returns the number.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A reader whose bytes are counted.
pub(crate) struct Counted<R> {
    pub(crate) reader: R,
    pub(crate) read: ReadBytes,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(bytes)?;
        self.read.0.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
