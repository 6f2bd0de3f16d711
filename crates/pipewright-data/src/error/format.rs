//! The errors of the formats of data files.

use std::path::PathBuf;

use pipewright_system::bounded_file::Size;
use thiserror::Error;

/// Why the content of a data file does not have the form that its reader expects.
#[derive(Error)]
pub enum FormatError {
    /// Rows of ids are to be tokenized.
    #[error("{}: its lines are token ids, which need no tokenizer; name the file in `data.path`", path.display())]
    RowsOfIds {
        /// The file.
        path: PathBuf,
    },
    /// A line of a `.jsonl` file is not an array of ids.
    #[error("{}:{line}:{column}: not an array of token ids: {reason}; write lines such as [12, 7, 255]", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// The column, counted from 1.
        column: usize,
        /// The parser's reason, without its place: that counts from the beginning of the line.
        reason: String,
    },
    /// A line of a `.jsonl` file has another length than a row.
    #[error(
        "{}:{line}: the row holds {found} ids, and seq_len {seq_len} takes {}; correct the row or seq_len",
        path.display(), seq_len + 1
    )]
    RowLength {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// Ids in the row.
        found: usize,
        /// Tokens per row that the model receives.
        seq_len: usize,
    },
    /// Files whose rows are made in different ways cannot be mixed.
    #[error("{}: the file has {found}, and {} has {expected}: train on them in two runs", path.display(), first.display())]
    MixedForms {
        /// The file.
        path: PathBuf,
        /// The content of the file.
        found: &'static str,
        /// The first file.
        first: PathBuf,
        /// The content of the first file.
        expected: &'static str,
    },
    /// A Parquet file is compressed in a way that is not read.
    #[error("{}: its columns are compressed with {codec}; write the file with snappy, gzip, zstd or without compression", path.display())]
    ParquetCodec {
        /// The file.
        path: PathBuf,
        /// The compression.
        codec: String,
    },
    /// A Parquet file is damaged, ends early, or has a feature that is not read.
    #[error(
        "{}: the Parquet file cannot be read to its end, so nothing of it is used; copy or download it again", path.display()
    )]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The library was built without Parquet.
    #[error(
        "{}: Parquet is not compiled in; build with the feature `parquet` (`cargo build --release --features parquet`), or convert \
         the file to .jsonl", path.display()
    )]
    ParquetNotCompiledIn {
        /// The file.
        path: PathBuf,
    },
    /// A file has another format than its ending says.
    #[error("{}: the name ends in .{ending}, and the content is not {format}; rename the file", path.display())]
    NotOfItsName {
        /// The file.
        path: PathBuf,
        /// The ending.
        ending: &'static str,
        /// The format of the ending.
        format: &'static str,
    },
    /// A JSON file that has no record per line.
    #[error(
        "{}: this is JSON without a record per line, and not text; convert a list with `jq -c .[] FILE > FILE.jsonl`, or leave \
         the file out with a pattern such as \"!**/{}\"", path.display(), path.file_name().unwrap_or_default().display()
    )]
    JsonNotLines {
        /// The file.
        path: PathBuf,
    },
    /// A file with a record per line has the name of a text.
    #[error("{}: the lines are JSON, and not text; let the name end in .jsonl", path.display())]
    LinesNamedText {
        /// The file.
        path: PathBuf,
    },
    /// The index of Megatron's ids is given without them.
    #[error("{}: this is the index of a .bin file; name the .bin file", path.display())]
    IndexAlone {
        /// The file.
        path: PathBuf,
    },
    /// The index of Megatron's ids cannot be used.
    #[error("{}: not an index of Megatron's token ids: {reason}; write it again, or remove it", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A file begins as llm.c's do, and its header cannot be used.
    #[error("{}: not a file of token ids of llm.c: {reason}; write it again with ids of 16 bits", path.display())]
    TokenHeader {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A file without a header has ids of more than 16 bits.
    #[error(
        "{}: the file looks like token ids of 32 bits without a header, and a `.bin` file without a header has ids of 16 bits; \
         write it with llm.c's header, or put Megatron's `.idx` next to it", path.display()
    )]
    WideIds {
        /// The file.
        path: PathBuf,
    },
    /// An index lists a sequence that the file does not have.
    #[error(
        "{}: the file ends before sequence {sequence} of {}; copy or download both again", path.display(), index.display()
    )]
    BeyondFile {
        /// The file.
        path: PathBuf,
        /// The sequence, counted from 1.
        sequence: usize,
        /// The index.
        index: PathBuf,
    },
    /// A file has another number of ids than its header says.
    #[error("{}: the header says {stated} token ids, and the file has {found}; copy or download it again", path.display())]
    OtherCount {
        /// The file.
        path: PathBuf,
        /// The number in the header.
        stated: u64,
        /// The number of ids.
        found: u64,
    },
    /// A file of binary ids ends inside an id.
    #[error("{}: the file ends inside a token id of {width} bytes; copy or download it again", path.display())]
    HalfId {
        /// The file.
        path: PathBuf,
        /// The bytes of an id.
        width: usize,
    },
    /// A line of a `.jsonl` file is too long to be a row.
    #[error("{}:{line}: the line has more than {}, too long for a row of seq_len {seq_len}; write one array per line", path.display(), Size(*limit))]
    LongLine {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// The longest line that is read, in bytes.
        limit: u64,
        /// Tokens per row that the model receives.
        seq_len: usize,
    },
}

pipewright_schedule::message_as_debug!(FormatError);
