//! Reads text files whose bytes are their token ids.

use std::io::Read;
use std::path::{Path, PathBuf};

use pipewright_system::bounded_file::open_regular;

use crate::train::data::content;
use crate::train::data::error::{DataError, TokenPlace};
use crate::train::data::ids::Ids;
use crate::train::data::memory_budget::MemoryBudget;

/// Returns the bytes of all files, one file after another, with `bos` before each.
pub(super) fn read(
    files: &[PathBuf],
    bos: Option<u32>,
    vocab_size: usize,
    budget: &mut MemoryBudget,
) -> Result<Ids, DataError> {
    let Some(bos) = bos else { return read_bytes(files, vocab_size, budget) };
    let mut ids = Ids::new(vocab_size);
    let mut bytes = Vec::new();
    for path in files {
        bytes.clear();
        append(path, &mut bytes, budget)?;
        check(path, &bytes, vocab_size)?;
        let of_ids = ((bytes.len() + 1) * ids.width()) as u64;
        // The file's bytes and its ids are in memory at the same time.
        budget.require(path, (bytes.len() as u64).saturating_add(of_ids))?;
        budget.take(path, of_ids)?;
        ids.push_document(Some(bos), bytes.iter().copied().map(u32::from));
    }
    Ok(ids)
}

fn read_bytes(files: &[PathBuf], vocab_size: usize, budget: &mut MemoryBudget) -> Result<Ids, DataError> {
    let mut bytes = Vec::new();
    for path in files {
        let start = bytes.len();
        append(path, &mut bytes, budget)?;
        budget.take(path, (bytes.len() - start) as u64)?;
        check(path, &bytes[start..], vocab_size)?;
    }
    Ok(Ids::One(bytes))
}

/// Returns the bytes of a text in memory, with `bos` before it; errors call it `name`.
pub(super) fn of_text(
    text: &str,
    name: &Path,
    bos: Option<u32>,
    vocab_size: usize,
) -> Result<Ids, DataError> {
    check(name, text.as_bytes(), vocab_size)?;
    let Some(bos) = bos else { return Ok(Ids::One(text.as_bytes().to_vec())) };
    let mut ids = Ids::new(vocab_size);
    ids.push_document(Some(bos), text.bytes().map(u32::from));
    Ok(ids)
}

/// Appends a file's bytes, if the budget has room for them.
pub(super) fn append(path: &Path, bytes: &mut Vec<u8>, budget: &MemoryBudget) -> Result<(), DataError> {
    let unreadable = |source| DataError::Read { path: path.to_owned(), source };
    let file = open_regular(path).map_err(unreadable)?;
    let size = file.metadata().map_err(unreadable)?.len();
    budget.require(path, size)?;
    // Growing by a half at a time avoids copying the bytes of earlier files for every further file.
    let room = usize::try_from(size).ok().map(|size| size.max(bytes.len() / 2));
    if bytes.capacity() - bytes.len() < usize::try_from(size).unwrap_or(usize::MAX) {
        let reserved = room.is_some_and(|room| bytes.try_reserve_exact(room).is_ok());
        if !reserved {
            return Err(DataError::Memory { path: path.to_owned(), bytes: size, left: budget.left() });
        }
    }
    // A file may be longer than the system reports, such as a file in /proc.
    let read = file.take(budget.left().saturating_add(1)).read_to_end(bytes).map_err(unreadable)?;
    budget.require(path, read as u64)
}

/// Returns the text in a file's bytes. A file that is not text is refused with what it is.
pub(super) fn utf8<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, DataError> {
    if let Some(binary) = content::binary(bytes) {
        return Err(DataError::NotText { path: path.to_owned(), binary });
    }
    if content::is_lfs_pointer(bytes) {
        return Err(DataError::LfsPointer { path: path.to_owned() });
    }
    std::str::from_utf8(bytes)
        .map_err(|error| DataError::NotUtf8 { path: path.to_owned(), offset: error.valid_up_to() as u64 })
}

fn check(path: &Path, bytes: &[u8], vocab_size: usize) -> Result<(), DataError> {
    utf8(path, bytes)?;
    match bytes.iter().position(|byte| usize::from(*byte) >= vocab_size) {
        None => Ok(()),
        Some(offset) => Err(DataError::BeyondVocabulary {
            path: path.to_owned(),
            place: TokenPlace::Byte(offset as u64),
            id: u64::from(bytes[offset]),
            vocab_size,
        }),
    }
}
