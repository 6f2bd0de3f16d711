//! Counts the bytes that are read from files.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
