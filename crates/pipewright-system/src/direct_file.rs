//! A file whose bytes are read past the page cache, so that reading a large file again and again takes no memory from
//! the machine.
//!
//! The file is opened for direct reads (`O_DIRECT`) where its file system has them. Elsewhere each read is followed by
//! advice to drop the pages. A file that was changed, cut or removed since it was opened is an error after each read.

use std::cell::RefCell;
use std::fs::{self, File, Metadata};
use std::io::{self, Error, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use pipewright_schedule::plan::READ_ROOM;

use crate::bounded_file::{open_regular, open_regular_with_flags};

/// The alignment of direct reads in the file and in memory. The blocks of disks are not larger.
const BLOCK: usize = 4096;

/// The bytes of one read. A disk reaches its rate with reads of this size.
const READ: usize = READ_ROOM as usize;

/// A file for direct reads.
#[derive(Debug)]
pub struct DirectFile {
    path: PathBuf,
    file: File,
    is_direct: bool,
    found: Found,
}

thread_local! {
    /// The aligned part of it gets the bytes of a read. A thread reads one file at a time.
    static ROOM: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The facts by which a changed file is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    length: u64,
    modified: Option<SystemTime>,
}

impl From<&Metadata> for Found {
    fn from(metadata: &Metadata) -> Self {
        Self { length: metadata.len(), modified: metadata.modified().ok() }
    }
}

impl DirectFile {
    /// Opens a regular file.
    ///
    /// # Errors
    /// When there is no such file, or the system reports an error.
    pub fn open(path: &Path) -> io::Result<Self> {
        let (file, is_direct) = match open_direct(path) {
            Some(file) => (file, true),
            None => (open_regular(path)?, false),
        };
        let found = (&file.metadata()?).into();
        Ok(Self { path: path.to_owned(), file, is_direct, found })
    }

    /// Returns whether reads go past the page cache. Otherwise each read drops its pages afterwards.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Reads a range of bytes.
    ///
    /// # Errors
    /// When the system reports an error, the file ends before the range does, or the file has changed.
    pub fn read(&mut self, range: Range<u64>) -> io::Result<Vec<u8>> {
        let read = ROOM.with_borrow_mut(|room| {
            room.resize(READ + BLOCK, 0);
            let aligned = room.as_ptr().align_offset(BLOCK);
            self.read_unchecked(range, &mut room[aligned..][..READ])
        });
        // A change explains what the system reports.
        self.require_unchanged()?;
        read
    }

    fn read_unchecked(&mut self, range: Range<u64>, room: &mut [u8]) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        let mut position = range.start;
        while position < range.end {
            let skipped = position as usize % BLOCK;
            let wanted = ((range.end - position) as usize + skipped).next_multiple_of(BLOCK).min(READ);
            let start = position - skipped as u64;
            let count = match read_at(&self.file, &mut room[..wanted], start) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::InvalidInput && self.is_direct => {
                    // Some file systems refuse direct reads only here.
                    (self.file, self.is_direct) = (open_regular(&self.path)?, false);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let end = count.min(skipped + (range.end - position) as usize);
            if end <= skipped {
                return Err(Error::new(ErrorKind::UnexpectedEof, "the file ends too early"));
            }
            bytes.extend_from_slice(&room[skipped..end]);
            if !self.is_direct {
                drop_pages(&self.file, start..start + count as u64);
            }
            position += (end - skipped) as u64;
        }
        Ok(bytes)
    }

    fn require_unchanged(&self) -> io::Result<()> {
        let fault = match fs::metadata(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => "the file was removed while it was in use",
            Err(error) => return Err(error),
            Ok(found) if found.len() < self.found.length => "the file was cut short while it was in use",
            Ok(found) if Found::from(&found) != self.found => "the file was changed while it was in use",
            Ok(_) => return Ok(()),
        };
        Err(Error::other(fault))
    }
}

/// Opens a file for direct reads; `None` if that is not possible.
#[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
fn open_direct(path: &Path) -> Option<File> {
    open_regular_with_flags(path, rustix::fs::OFlags::DIRECT.bits() as i32).ok()
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd")))]
fn open_direct(_path: &Path) -> Option<File> {
    // `DirectFile::open` opens it without these flags.
    let _ = open_regular_with_flags;
    None
}

#[cfg(unix)]
fn read_at(file: &File, room: &mut [u8], start: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, room, start)
}

#[cfg(not(unix))]
fn read_at(mut file: &File, room: &mut [u8], start: u64) -> io::Result<usize> {
    use std::io::{Read, Seek, SeekFrom};
    file.seek(SeekFrom::Start(start))?;
    file.read(room)
}

/// Advises the system to drop the pages of a range.
#[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
fn drop_pages(file: &File, range: Range<u64>) {
    let length = std::num::NonZeroU64::new(range.end - range.start);
    // The reads are right without it.
    let _ = rustix::fs::fadvise(file, range.start, length, rustix::fs::Advice::DontNeed);
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd")))]
fn drop_pages(_file: &File, _range: Range<u64>) {}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|index| (index * 31 + index / 251) as u8).collect()
    }

    #[test]
    fn any_range_has_the_bytes_of_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, bytes) = (folder.path().join("a"), pattern(READ + 3 * BLOCK + 17));
        fs::write(&path, &bytes).expect("a file");
        let mut direct = DirectFile::open(&path).expect("it is there");
        let mut cached = DirectFile {
            is_direct: false,
            file: File::open(&path).expect("it is there"),
            ..DirectFile::open(&path).expect("it is there")
        };
        let whole = bytes.len();
        for range in [0..0, 0..1, 5..BLOCK, BLOCK - 1..BLOCK + 1, 17..whole, 0..whole, whole - 1..whole] {
            for file in [&mut direct, &mut cached] {
                let found = file.read(range.start as u64..range.end as u64).expect("it is in the file");
                assert!(found == bytes[range.clone()], "{range:?}");
            }
        }
        let error = direct.read(whole as u64 - 1..whole as u64 + 1).expect_err("the file ends before");
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_direct_file_is_open_with_the_flag_of_direct_reads() {
        // The file system of the sources, because the one of temporary files may have no direct reads.
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/direct_file.rs");
        let file = DirectFile::open(&path).expect("it is there");
        let flags = rustix::fs::fcntl_getfl(&file.file).expect("the flags");
        assert_eq!(file.is_direct(), flags.contains(rustix::fs::OFlags::DIRECT));
    }

    #[test]
    fn a_file_that_has_changed_is_an_error() {
        let check = |change: &dyn Fn(&Path), expected: &str| {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("a");
            fs::write(&path, pattern(10_000)).expect("a file");
            let old = SystemTime::UNIX_EPOCH;
            File::options().append(true).open(&path).and_then(|file| file.set_modified(old)).expect("a time");
            let mut file = DirectFile::open(&path).expect("it is there");
            assert_eq!(file.read(0..9_000).expect("it is unchanged").len(), 9_000);
            change(&path);
            let error = file.read(0..9_000).expect_err("it has changed").to_string();
            assert_eq!(error, format!("the file was {expected} while it was in use"));
        };
        check(&|path| fs::remove_file(path).expect("it is there"), "removed");
        check(&|path| fs::write(path, pattern(8_000)).expect("a file"), "cut short");
        let write = |path: &Path| {
            let mut file = File::options().write(true).open(path).expect("it is there");
            file.write_all(b"x").expect("a byte");
        };
        check(&write, "changed");
    }
}
