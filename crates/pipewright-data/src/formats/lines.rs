//! Parses the lines of a `.jsonl` file: JSON objects, or arrays of token ids. Lines of white space are
//! skipped.

use std::path::Path;

use minijinja::Value;

use crate::chat::json_text;
use crate::container::data_file::DataFile;
use crate::content;
use crate::error::{DataError, FileError, FormatError};
use crate::record_error::{RecordError, RecordPlace, RecordProblem};

/// A line with content.
pub(crate) enum Line {
    /// An array of token ids.
    Ids(Vec<u64>),
    /// A record.
    Record(Value),
}

/// The lines of a file.
pub(crate) struct Lines<'a> {
    file: &'a mut DataFile,
    /// The longest accepted array in bytes, and the number of tokens that a row takes.
    longest_array: (u64, usize),
    /// The longest accepted record in bytes: the memory that is left for data.
    longest_record: u64,
    text: Vec<u8>,
    number: u64,
}

impl<'a> Lines<'a> {
    pub(crate) fn new(file: &'a mut DataFile, seq_len: usize, longest_record: u64) -> Self {
        // Room for every id with its comma and much white space.
        let longest_array = ((1 << 20) + 64 * seq_len as u64, seq_len);
        Self { file, longest_array, longest_record, text: Vec::new(), number: 0 }
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns the next line that has content, with its number, which counts from 1.
    pub(crate) fn next(&mut self) -> Result<Option<(u64, Vec<u8>)>, DataError> {
        loop {
            let is_record = self.file.head()?.trim_ascii_start().starts_with(b"{");
            let limit = if is_record { self.longest_record } else { self.longest_array.0 };
            let read = self.file.read_line(limit, &mut self.text)?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            let text = if self.number == 1 { first_line(self.file.path(), &self.text)? } else { &self.text };
            if read > limit {
                return Err(self.long(is_record, limit));
            }
            let text = text.trim_ascii_end();
            if !text.trim_ascii_start().is_empty() {
                return Ok(Some((self.number, text.to_vec())));
            }
        }
    }

    fn long(&self, is_record: bool, limit: u64) -> DataError {
        let (path, line) = (self.file.path().to_owned(), self.number);
        if is_record {
            let (place, problem) = (RecordPlace::Line(line), RecordProblem::Memory { left: limit });
            return RecordError { path, place, problem }.into();
        }
        DataError::from(FormatError::LongLine { path, line, limit, seq_len: self.longest_array.1 })
    }
}

/// Parses a line that has content.
pub(crate) fn parse(path: &Path, line: u64, text: &[u8]) -> Result<Line, DataError> {
    match text.trim_ascii_start().first() {
        Some(b'[') => ids(path, line, text).map(Line::Ids),
        _ => record(path, line, text).map(Line::Record),
    }
}

/// Returns the first line without the byte-order mark that some editors write. A file of another format is
/// refused.
fn first_line<'a>(path: &Path, line: &'a [u8]) -> Result<&'a [u8], DataError> {
    match content::binary(line) {
        Some(binary) => Err(FileError::NotText { path: path.to_owned(), binary }.into()),
        None => Ok(line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line)),
    }
}

fn ids(path: &Path, line: u64, text: &[u8]) -> Result<Vec<u64>, DataError> {
    placed(serde_json::from_slice(text)).map_err(|(column, reason)| {
        DataError::from(FormatError::Line { path: path.to_owned(), line, column, reason })
    })
}

fn record(path: &Path, line: u64, text: &[u8]) -> Result<Value, DataError> {
    placed(json_text::parse(text)).map_err(|(column, reason)| {
        let (path, place) = (path.to_owned(), RecordPlace::Line(line));
        RecordError { path, place, problem: RecordProblem::NotJson { column, reason } }.into()
    })
}

/// Returns an error of a line of JSON as its column and its reason.
fn placed<T>(parsed: Result<T, serde_json::Error>) -> Result<T, (usize, String)> {
    parsed.map_err(|error| {
        let reason = error.to_string();
        // The parser's place counts from the beginning of the line that it received.
        let place = format!(" at line {} column {}", error.line(), error.column());
        (error.column().max(1), reason.strip_suffix(&place).unwrap_or(&reason).to_owned())
    })
}
