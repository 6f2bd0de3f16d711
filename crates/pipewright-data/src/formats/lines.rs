//! Parses the lines of a `.jsonl` file: JSON objects, or arrays of token ids. Lines of white space are
//! skipped. The records of a JSON list are parsed in the same way.

use std::path::Path;

use minijinja::Value;
use pipewright_system::bounded_file::Size;

use crate::chat::json_text;
use crate::container::data_file::DataFile;
use crate::content;
use crate::error::{DataError, DataPlace};

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

    /// Returns the next line that has content, with its place.
    pub(crate) fn next(&mut self) -> Result<Option<(DataPlace, Vec<u8>)>, DataError> {
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
                return Ok(Some((DataPlace::Line(self.number), text.to_vec())));
            }
        }
    }

    fn long(&self, is_record: bool, limit: u64) -> DataError {
        let (limit, seq_len) = (Size(limit), self.longest_array.1);
        let error = if is_record {
            long_record(limit)
        } else {
            DataError::new(format!(
                "the line has more than {limit}, too long for a row of seq_len {seq_len}; write one array per line"
            ))
        };
        error.at(self.file.path(), DataPlace::Line(self.number))
    }
}

/// Returns the error of a record that needs more memory than is left.
pub(crate) fn long_record(limit: Size) -> DataError {
    DataError::new(format!(
        "the record has more than the {limit} of the memory for data that are left (half of what this machine has available); \
         give less data, or use a machine with more memory"
    ))
}

/// Returns whether a line is an array, and not a record.
pub(crate) fn is_array(text: &[u8]) -> bool {
    text.trim_ascii_start().starts_with(b"[")
}

/// Returns the token ids of a line that is an array.
pub(crate) fn ids(path: &Path, place: DataPlace, text: &[u8]) -> Result<Vec<u64>, DataError> {
    serde_json::from_slice(text).map_err(|error| {
        let problem =
            format!("not an array of token ids: {}; write lines such as [12, 7, 255]", reason_of(&error));
        DataError::new(problem).at(path, within(place, &error))
    })
}

/// Returns the record of a line or of a list.
pub(crate) fn record(path: &Path, place: DataPlace, text: &[u8]) -> Result<Value, DataError> {
    json_text::parse(text).map_err(|error| {
        let reason = reason_of(&error);
        let expected = match place {
            DataPlace::Column(..) => "write records such as {\"text\": \"to be\"}",
            _ => "write one record per line, such as {\"text\": \"to be\"}, or an array of token ids",
        };
        DataError::new(format!("not JSON: {reason}; {expected}")).of_record(path, within(place, &error))
    })
}

/// Returns the first line without the byte-order mark that some editors write. A file of another format is
/// refused.
fn first_line<'a>(path: &Path, line: &'a [u8]) -> Result<&'a [u8], DataError> {
    content::refuse_binary(path, content::binary(line))?;
    Ok(line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line))
}

/// Returns the place of an error of JSON that begins at `start`. The parser counts from the beginning of the text that
/// it received.
fn within(start: DataPlace, error: &serde_json::Error) -> DataPlace {
    let (line, column) = (error.line().max(1), error.column().max(1));
    match start {
        DataPlace::Line(start) => DataPlace::Column(start, column),
        DataPlace::Column(start, before) if line == 1 => DataPlace::Column(start, before + column - 1),
        DataPlace::Column(start, _) => DataPlace::Column(start + line as u64 - 1, column),
        other => other,
    }
}

/// Returns the reason of an error of JSON without the parser's place.
fn reason_of(error: &serde_json::Error) -> String {
    let reason = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    reason.strip_suffix(&place).unwrap_or(&reason).to_owned()
}
