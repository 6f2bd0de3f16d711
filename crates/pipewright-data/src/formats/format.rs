//! The formats of data files, which are recognised by the name and the content together.
//!
//! | ending | content |
//! |---|---|
//! | `.jsonl`, `.ndjson` | a record or an array of token ids per line, or one list of records |
//! | `.json` | the same; JSON in another form is refused |
//! | `.parquet` | a record per row |
//! | `.bin` | token ids, with an `.idx` next to it if they are Megatron's |
//! | any other | text; JSON and binary formats are refused |

use std::fmt;
use std::path::Path;

use serde::de::IgnoredAny;

use crate::container::data_file::DataFile;
use crate::container::data_file::Packing;
use crate::content;
use crate::error::DataError;
use crate::formats::list::begins_list;
use crate::settings::record::RecordKind;

/// The content of a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text in UTF-8.
    Text,
    /// An array of token ids per line.
    IdLines,
    /// A JSON object per line.
    Lines(RecordKind),
    /// One JSON list of objects.
    List(RecordKind),
    /// The rows of a Parquet file.
    Parquet(RecordKind),
    /// Token ids of 16 bits without a header, as nanoGPT writes them.
    Ids16,
    /// Token ids with the header of llm.c.
    LlmC,
    /// Token ids with an index, as Megatron writes them.
    Megatron,
    /// Token ids of `pipewright tokenize`.
    Tokenized,
}

impl Format {
    /// Returns whether a tokenizer turns the content into ids.
    pub fn is_text(self) -> bool {
        matches!(self, Self::Text | Self::Lines(_) | Self::List(_) | Self::Parquet(_))
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text => f.write_str("text"),
            Self::IdLines => f.write_str("lines of token ids"),
            Self::Lines(kind) => write!(f, "JSON lines with {kind}"),
            Self::List(kind) => write!(f, "a JSON list with {kind}"),
            Self::Parquet(kind) => write!(f, "Parquet with {kind}"),
            Self::Ids16 => f.write_str("token ids of 16 bits"),
            Self::LlmC => f.write_str("token ids with llm.c's header"),
            Self::Megatron => f.write_str("Megatron's token ids"),
            Self::Tokenized => f.write_str("token ids of `pipewright tokenize`"),
        }
    }
}

/// A kind of data file, and how many files of it there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataSource {
    /// The format.
    pub format: Format,
    /// How the files are compressed.
    pub packing: Packing,
    /// The number of files.
    pub files: usize,
}

impl DataSource {
    /// Returns one entry for each kind, in the order of their first files.
    pub(crate) fn merged(sources: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut merged: Vec<Self> = Vec::new();
        for source in sources {
            let kind = |known: &&mut Self| (known.format, known.packing) == (source.format, source.packing);
            match merged.iter_mut().find(kind) {
                Some(known) => known.files += source.files,
                None => merged.push(source),
            }
        }
        merged
    }
}

impl fmt::Display for DataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, packing, files } = self;
        write!(f, "{files} {} of {format}", if *files == 1 { "file" } else { "files" })?;
        match packing {
            Packing::Plain => Ok(()),
            packing => write!(f, ", {packing}"),
        }
    }
}

/// The reader that a file needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReaderKind {
    Text,
    Lines,
    List,
    Parquet,
    Binary,
}

/// Returns the reader that a file needs.
pub(crate) fn reader_of(file: &mut DataFile) -> Result<ReaderKind, DataError> {
    let ending = file.ending();
    let path = file.path().to_owned();
    let head = file.head()?;
    content::refuse_lfs_pointer(&path, head)?;
    match ending.as_deref() {
        Some("jsonl" | "ndjson" | "json") if begins_list(head) => Ok(ReaderKind::List),
        Some("jsonl" | "ndjson") => Ok(ReaderKind::Lines),
        Some("json") if begins_with_lines(head, 1) => Ok(ReaderKind::Lines),
        Some("json") if content::binary(head).is_none() => Err(json_not_lines(&path)),
        Some("parquet") if head.starts_with(b"PAR1") => Ok(ReaderKind::Parquet),
        Some("parquet") => Err(not_of_its_name(&path, "parquet", "a Parquet file")),
        Some("bin") => Ok(ReaderKind::Binary),
        Some("idx") => Err(DataError::of(&path, "this is the index of a .bin file; name the .bin file")),
        _ if begins_with_lines(head, 2) => Err(lines_named_text(&path)),
        _ => Ok(ReaderKind::Text),
    }
}

/// Returns whether content begins with `count` lines of JSON, each an object or an array of token ids.
fn begins_with_lines(head: &[u8], count: usize) -> bool {
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let lines = head.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    lines.take(count).take_while(|line| is_record(line) || is_cut_record(line, head)).count() == count
}

/// Returns whether a line is an object or an array of token ids.
fn is_record(line: &[u8]) -> bool {
    let line = line.trim_ascii();
    match line.first() {
        Some(b'{') => serde_json::from_slice::<IgnoredAny>(line).is_ok(),
        Some(b'[') => serde_json::from_slice::<Vec<u64>>(line).is_ok(),
        _ => false,
    }
}

/// Returns whether a line begins as a record does and continues after the head, because it is long. An array
/// of objects is not a record.
fn is_cut_record(line: &[u8], head: &[u8]) -> bool {
    let is_cut = head.ends_with(line) && line.len() > (1 << 15);
    let line = line.trim_ascii_start();
    let begins = match line.strip_prefix(b"[") {
        Some(rest) => rest.trim_ascii_start().first().is_some_and(u8::is_ascii_digit),
        None => line.starts_with(b"{"),
    };
    is_cut && begins
}

/// Refuses a text that is JSON as a whole, or whose first lines are records.
pub(crate) fn refuse_json(file: &DataFile, text: &str) -> Result<(), DataError> {
    let begins = text.trim_start_matches('\u{feff}').trim_start();
    if !begins.starts_with(['{', '[']) {
        return Ok(());
    }
    // The first lines may be longer than the head that `reader_of` looks at.
    let mut lines = begins.lines().filter(|line| !line.trim().is_empty());
    if let (Some(first), Some(second)) = (lines.next(), lines.next())
        && is_record(first.as_bytes())
        && is_record(second.as_bytes())
    {
        return Err(lines_named_text(file.path()));
    }
    if serde_json::from_str::<IgnoredAny>(begins).is_err() {
        return Ok(());
    }
    Err(if begins_list(text.as_bytes()) { list_named_text(file.path()) } else { json_not_lines(file.path()) })
}

/// Returns the error of a file that has another format than its ending says.
pub(crate) fn not_of_its_name(path: &Path, ending: &str, format: &str) -> DataError {
    DataError::of(
        path,
        format!("the name ends in .{ending}, and the content is not {format}; rename the file"),
    )
}

fn lines_named_text(path: &Path) -> DataError {
    DataError::of(path, "the lines are JSON, and not text; let the name end in .jsonl")
}

fn list_named_text(path: &Path) -> DataError {
    DataError::of(path, "this is a JSON list of records, and not text; let the name end in .json")
}

fn json_not_lines(path: &Path) -> DataError {
    DataError::of(
        path,
        format!(
            "this is JSON that is neither a record per line nor a list of records, and not text; write its records as one of \
             them, or leave the file out with a pattern such as \"!**/{}\"",
            path.file_name().unwrap_or_default().display()
        ),
    )
}
