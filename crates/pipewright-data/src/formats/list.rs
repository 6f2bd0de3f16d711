//! Reads the records of a file that is one JSON list, one after another: the list is never in memory as a whole.

use std::path::Path;

use pipewright_system::bounded_file::Size;

use crate::container::data_file::DataFile;
use crate::error::{DataError, DataPlace};
use crate::formats::lines::long_record;

/// The records of a list.
pub(crate) struct ListRecords<'a> {
    file: &'a mut DataFile,
    /// The longest accepted record in bytes: the memory that is left for data.
    longest: u64,
    is_begun: bool,
    /// The place of the next byte, counted from 1.
    line: u64,
    column: usize,
}

/// Returns whether content is a list whose first item is an object.
pub(crate) fn begins_list(content: &[u8]) -> bool {
    let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content).trim_ascii_start();
    content.strip_prefix(b"[").is_some_and(|rest| rest.trim_ascii_start().starts_with(b"{"))
}

impl<'a> ListRecords<'a> {
    /// The file begins with a list, as [`begins_list`] says.
    pub(crate) fn new(file: &'a mut DataFile, longest: u64) -> Self {
        Self { file, longest, is_begun: false, line: 1, column: 1 }
    }

    /// Returns the next record with its place.
    pub(crate) fn next(&mut self) -> Result<Option<(DataPlace, Vec<u8>)>, DataError> {
        if !self.is_begun && self.file.head()?.starts_with(b"\xef\xbb\xbf") {
            self.file.consume(3);
        }
        let expected = if self.is_begun { b',' } else { b'[' };
        match self.after_space()? {
            Some(byte) if byte == expected => self.take(byte),
            Some(b']') if self.is_begun => {
                self.take(b']');
                return match self.after_space()? {
                    None => Ok(None),
                    Some(_) => Err(self.unexpected("something follows the list")),
                };
            }
            None => return Err(self.unexpected("the list has no end")),
            Some(_) => return Err(self.unexpected("there is no comma between two records")),
        }
        self.is_begun = true;
        if matches!(self.after_space()?, None | Some(b',' | b']')) {
            return Err(self.unexpected("there is no record behind a comma"));
        }
        let place = DataPlace::Column(self.line, self.column);
        Ok(Some((place, self.value()?)))
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    fn byte(&mut self) -> Result<Option<u8>, DataError> {
        Ok(self.file.head()?.first().copied())
    }

    /// Passes over the next byte.
    fn take(&mut self, byte: u8) {
        self.file.consume(1);
        if byte == b'\n' {
            (self.line, self.column) = (self.line + 1, 1);
        } else {
            self.column += 1;
        }
    }

    /// Returns the next byte that is not white space.
    fn after_space(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            match self.byte()? {
                Some(space) if space.is_ascii_whitespace() => self.take(space),
                other => return Ok(other),
            }
        }
    }

    /// Reads up to the end of a value. Its reader checks its content.
    fn value(&mut self) -> Result<Vec<u8>, DataError> {
        let start = DataPlace::Column(self.line, self.column);
        let (mut text, mut depth, mut is_text, mut is_escaped) = (Vec::new(), 0usize, false, false);
        let mut is_complete = false;
        while !is_complete {
            let head = self.file.head()?;
            if head.is_empty() {
                return Err(self.unexpected("the list has no end"));
            }
            let mut length = 0;
            for &byte in head {
                let is_end = matches!(byte, b',' | b']') || byte.is_ascii_whitespace();
                is_complete = depth == 0 && !is_text && text.len() + length > 0 && is_end;
                if is_complete {
                    break;
                }
                length += 1;
                (self.line, self.column) =
                    if byte == b'\n' { (self.line + 1, 1) } else { (self.line, self.column + 1) };
                match byte {
                    _ if is_escaped => is_escaped = false,
                    b'\\' if is_text => is_escaped = true,
                    b'"' => is_text = !is_text,
                    b'{' | b'[' if !is_text => depth += 1,
                    b'}' | b']' if !is_text => depth = depth.saturating_sub(1),
                    _ => {}
                }
                is_complete = depth == 0 && !is_text && matches!(byte, b'}' | b']');
                if is_complete {
                    break;
                }
            }
            text.extend_from_slice(&head[..length]);
            self.file.consume(length);
            if text.len() as u64 > self.longest {
                return Err(long_record(Size(self.longest)).at(self.path(), start));
            }
        }
        Ok(text)
    }

    fn unexpected(&self, problem: &str) -> DataError {
        let place = DataPlace::Column(self.line, self.column);
        DataError::new(format!(
            "the JSON list is malformed: {problem}; write `[`, records with commas between them, and `]`"
        ))
        .at(self.path(), place)
    }
}
