//! Writes a file of token ids: under another name next to it, which becomes the file's when it is complete
//! and on the disk.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use pipewright_system::bounded_file::{Size, create_fresh};

use super::header::{Header, LENGTH};
use crate::collected::Frequencies;
use crate::error::DataError;
use crate::storage::bytes::BLOCK;
use crate::storage::examples::{ExampleBuffer, RowPart};
use crate::storage::ids::{IdBuffer, Width};

/// A file that is not complete yet. If it is dropped before [`TokenWriter::finish`], the file is removed.
pub(crate) struct TokenWriter {
    path: PathBuf,
    unfinished: Unfinished,
    file: BufWriter<File>,
    width: Width,
    hasher: blake3::Hasher,
    blocks: BlockHashes,
    frequencies: Frequencies,
    largest_id: u32,
    bytes: u64,
    tokens: u64,
    /// The number of bytes of each example.
    sizes: Vec<u32>,
}

/// The hashes of the blocks of the content.
#[derive(Default)]
struct BlockHashes {
    /// The hash of the last block, which may not be complete.
    hasher: blake3::Hasher,
    hashes: Vec<u8>,
}

impl BlockHashes {
    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let free = BLOCK - self.hasher.count() as usize;
            let (block, behind) = bytes.split_at(free.min(bytes.len()));
            self.hasher.update(block);
            bytes = behind;
            if block.len() == free {
                self.end_block();
            }
        }
    }

    fn end_block(&mut self) {
        self.hashes.extend(self.hasher.finalize().as_bytes());
        self.hasher.reset();
    }

    /// Returns the hashes of all blocks.
    fn finish(&mut self) -> &[u8] {
        if self.hasher.count() > 0 {
            self.end_block();
        }
        &self.hashes
    }
}

/// The name of the file while it is written.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // After a success, no file has this name.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl TokenWriter {
    /// Begins the file `path`.
    pub(crate) fn create(path: &Path, vocab_size: usize) -> Result<Self, DataError> {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let name = PathBuf::from(name);
        let failed = |source| not_written(path, source);
        let mut file = BufWriter::with_capacity(1 << 20, create_fresh(&name).map_err(failed)?);
        let unfinished = Unfinished(name);
        file.write_all(&[0; LENGTH]).map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            unfinished,
            file,
            width: Width::of(vocab_size),
            hasher: blake3::Hasher::new(),
            blocks: BlockHashes::default(),
            frequencies: Frequencies::default(),
            largest_id: 0,
            bytes: 0,
            tokens: 0,
            sizes: Vec::new(),
        })
    }

    /// Returns the name that the file gets.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of ids that were written.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Writes ids and examples, and leaves both lists empty.
    pub(crate) fn write(
        &mut self,
        ids: &mut IdBuffer,
        examples: &mut ExampleBuffer,
    ) -> Result<(), DataError> {
        let bytes = std::mem::take(ids.bytes());
        let Self { frequencies, largest_id, tokens, .. } = self;
        self.width.each(&bytes, |id| {
            frequencies.count(id);
            *largest_id = (*largest_id).max(id);
            *tokens += 1;
        });
        self.append(&bytes)?;
        let (bytes, sizes) = examples.take();
        let mut rest = bytes.as_slice();
        for size in sizes {
            let (example, behind) = rest.split_at(size as usize);
            rest = behind;
            let part = RowPart::of_bytes(example, self.width);
            part.targets().for_each(|id| self.frequencies.count(id));
            self.largest_id = part.ids.iter().copied().fold(self.largest_id, u32::max);
            self.tokens += part.ids.len() as u64;
            let size = u32::try_from(size).map_err(|_| {
                let most = Size(u32::MAX.into());
                DataError::of(&self.path, format!("a record has more than {most} of token ids; divide it"))
            });
            self.sizes.push(size?);
        }
        self.append(&bytes)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.hasher.update(bytes);
        self.blocks.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|source| not_written(&self.path, source))
    }

    /// Writes the header, and gives the file its name when everything is on the disk. `header` has the properties
    /// that the writer does not see; the writer adds those of the content.
    pub(crate) fn finish(mut self, mut header: Header) -> Result<Header, DataError> {
        let totals = self.frequencies.totals();
        let mut lists: Vec<u8> = self.sizes.iter().copied().flat_map(u32::to_le_bytes).collect();
        lists.extend(self.blocks.finish());
        header.examples = header.examples.map(|_| self.sizes.len() as u64);
        header.bytes = self.bytes;
        header.tokens = self.tokens;
        header.targets = totals.targets as u64;
        header.frequency_entropy = totals.frequency_entropy.to_bits();
        header.largest_id = self.largest_id;
        header.hash = self.hasher.finalize().to_hex().to_string();
        header.lists_hash = blake3::hash(&lists).to_hex().to_string();
        let written = self.end(&header, &lists);
        written.map_err(|source| not_written(&self.path, source))?;
        Ok(header)
    }

    fn end(&mut self, header: &Header, lists: &[u8]) -> io::Result<()> {
        self.file.write_all(lists)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header.to_bytes())?;
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        std::fs::rename(&self.unfinished.0, &self.path)?;
        if cfg!(unix) {
            // The new name is in the folder, which has its own buffer.
            let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
            File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
        }
        Ok(())
    }
}

fn not_written(path: &Path, source: io::Error) -> DataError {
    DataError::of(path, "cannot be written").caused_by(source)
}
