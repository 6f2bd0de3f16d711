//! [`PieceFile`]: a file that arrives in pieces from another process, in any order, because a short message may overtake a
//! long one ([`ByteChannel`](crate::byte_channel::ByteChannel)).

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Error, ErrorKind, Result, Seek, SeekFrom, Write};

/// The bytes after which the file is written to the disk. One call for a large file would take so long that the other process
/// could give up.
const SLICE: u64 = 64 << 20;

/// A file that arrives in pieces.
#[derive(Debug)]
pub(super) struct PieceFile {
    file: File,
    /// The positions of the pieces that have come.
    offsets: BTreeSet<u64>,
    /// Their bytes.
    written: u64,
    /// The bytes that may not be on the disk yet.
    unsynced: u64,
    /// Whether the bytes must be on the disk.
    syncs: bool,
}

impl PieceFile {
    /// Fills an empty file, which only has to be readable.
    pub(super) fn in_memory(file: File) -> Self {
        Self { file, offsets: BTreeSet::new(), written: 0, unsynced: 0, syncs: false }
    }

    /// Fills an empty file, which is on the disk when it is whole.
    pub(super) fn on_disk(file: File) -> Self {
        Self { syncs: true, ..Self::in_memory(file) }
    }

    /// Writes a piece of a file of `of` bytes. Returns whether the file is whole.
    ///
    /// # Errors
    /// When the piece is not one of the file or has come before, or the system reports an error.
    pub(super) fn put(&mut self, offset: u64, of: u64, bytes: &[u8]) -> Result<bool> {
        let length = bytes.len() as u64;
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= of);
        if !is_inside || self.offsets.contains(&offset) || self.written + length > of {
            let message = format!(
                "a piece of {length} bytes at {offset} is not one of its {of} bytes, or has come before"
            );
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        self.file.seek(SeekFrom::Start(offset))?;
        self.file.write_all(bytes)?;
        self.offsets.insert(offset);
        self.written += length;
        self.unsynced += length;
        let is_whole = self.written >= of;
        if self.syncs && (is_whole || self.unsynced >= SLICE) {
            self.file.sync_all()?;
            self.unsynced = 0;
        }
        Ok(is_whole)
    }
}
