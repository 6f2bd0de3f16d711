//! Reads a `.jsonl` file whose lines are arrays of token ids, one row each. Lines of white space are skipped.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use pipewright_system::bounded_file::open_regular;

use crate::train::data::content;
use crate::train::data::error::{DataError, TokenPlace};
use crate::train::data::ids::Ids;
use crate::train::data::memory_budget::MemoryBudget;

/// Returns the ids of all rows, one row after another; each row has `seq_len + 1` ids.
pub(super) fn read(
    path: &Path,
    seq_len: usize,
    vocab_size: usize,
    budget: &mut MemoryBudget,
) -> Result<Ids, DataError> {
    let unreadable = |source| DataError::Read { path: path.to_owned(), source };
    let mut reader = BufReader::new(open_regular(path).map_err(unreadable)?);
    let mut ids = Ids::new(vocab_size);
    let mut text = Vec::new();
    let limit = longest_line(seq_len);
    for line in 1.. {
        text.clear();
        let read = reader.by_ref().take(limit + 1).read_until(b'\n', &mut text).map_err(unreadable)?;
        if read == 0 {
            break;
        }
        let row = if line == 1 { first_line(path, &text)? } else { &text };
        if read as u64 > limit {
            return Err(DataError::LongLine { path: path.to_owned(), line, limit, seq_len });
        }
        if !row.iter().all(u8::is_ascii_whitespace) {
            let row = parse(path, line, row)?;
            check_row(path, line, &row, seq_len, vocab_size)?;
            budget.take(path, (row.len() * ids.width()) as u64)?;
            // Every id is below vocab_size, which fits, so the conversion loses nothing.
            row.into_iter().for_each(|id| ids.push(id as u32));
        }
    }
    Ok(ids)
}

/// Returns the first line without the byte-order mark that some editors write. A file of another format is
/// refused.
fn first_line<'a>(path: &Path, line: &'a [u8]) -> Result<&'a [u8], DataError> {
    if content::is_lfs_pointer(line) {
        return Err(DataError::LfsPointer { path: path.to_owned() });
    }
    match content::binary(line) {
        Some(binary) => Err(DataError::NotText { path: path.to_owned(), binary }),
        None => Ok(line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line)),
    }
}

/// Returns the longest accepted line in bytes: room for every id with its comma and much white space.
fn longest_line(seq_len: usize) -> u64 {
    (1 << 20) + 64 * seq_len as u64
}

fn parse(path: &Path, line: u64, text: &[u8]) -> Result<Vec<u64>, DataError> {
    serde_json::from_slice(text).map_err(|error| {
        let reason = error.to_string();
        // The parser's place counts from the beginning of the line that it received.
        let place = format!(" at line {} column {}", error.line(), error.column());
        let reason = reason.strip_suffix(&place).unwrap_or(&reason).to_owned();
        DataError::Line { path: path.to_owned(), line, column: error.column().max(1), reason }
    })
}

fn check_row(
    path: &Path,
    line: u64,
    row: &[u64],
    seq_len: usize,
    vocab_size: usize,
) -> Result<(), DataError> {
    if row.len() != seq_len + 1 {
        return Err(DataError::RowLength { path: path.to_owned(), line, found: row.len(), seq_len });
    }
    match row.iter().find(|id| **id >= vocab_size as u64) {
        None => Ok(()),
        Some(id) => Err(DataError::BeyondVocabulary {
            path: path.to_owned(),
            place: TokenPlace::Line(line),
            id: *id,
            vocab_size,
        }),
    }
}
