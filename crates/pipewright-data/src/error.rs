//! The errors of reading training data, with the file and the place in it.

use std::fmt;
use std::path::PathBuf;

use pipewright_system::bounded_file::Size;
use thiserror::Error;

use crate::chat_error::TemplateError;
use crate::content::Binary;
use crate::packing::Packing;
use crate::record_error::{RecordError, RecordPlace};

/// Why training data cannot be read.
#[derive(Error)]
pub enum DataError {
    /// No pattern is given, or all of them exclude.
    #[error("no data path is given; name text files, such as \"notes/**/*.txt\"")]
    NoPath,
    /// A pattern cannot be understood.
    #[error("{pattern}: not a pattern of paths: {reason}; check that brackets and braces are closed")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The reason.
        reason: String,
    },
    /// A pattern matches nothing.
    #[error(
        "{pattern}: no file matches; hidden files and files that a .gitignore lists are skipped, and relative \
         patterns start at {}", start.display()
    )]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// The folder that was searched.
        start: PathBuf,
    },
    /// A file does not exist.
    #[error("{}: there is no such data file; check the path", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file is named and excluded.
    #[error("{}: this file is named, and a pattern with `!` excludes it; remove one of the two", path.display())]
    Excluded {
        /// The file.
        path: PathBuf,
    },
    /// A folder is given where files are expected.
    #[error("{}: this is a folder; name the files in it, such as \"{}/**/*.txt\"", path.display(), path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
    },
    /// A device or pipe is given: a run reads its data again when it resumes.
    #[error("{}: this is a device or a pipe; copy its content to a regular file and name that", path.display())]
    NotRegular {
        /// The file.
        path: PathBuf,
    },
    /// A file or folder cannot be read.
    #[error("{}: cannot be read", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A file is not text.
    #[error(
        "{}: byte {offset} is not valid UTF-8; convert the file, or leave it out with a pattern such as \"!**/{}\"",
        path.display(), path.file_name().unwrap_or_default().display()
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// How many bytes of the file are valid.
        offset: u64,
    },
    /// A file has a format that is not text.
    #[error("{}: {binary}", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Its kind.
        binary: Binary,
    },
    /// A file is the pointer to another one, which Git LFS has not downloaded.
    #[error(
        "{}: this is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file", path.display()
    )]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// All files together hold no token.
    #[error("{}: the data is empty; name files that hold text", path.display())]
    Empty {
        /// The first file.
        path: PathBuf,
    },
    /// No chat or completion fits into a row, and long ones are left out.
    #[error(
        "{}: all {records} records have more tokens than the {} of a row of seq_len {seq_len}, and are skipped; raise \
         seq_len, or write `long_records = \"cut\"` in [data]", path.display(), seq_len + 1
    )]
    AllSkipped {
        /// The first file.
        path: PathBuf,
        /// The number of records.
        records: u64,
        /// Tokens per row that the model receives.
        seq_len: usize,
    },
    /// There are fewer rows than a step takes.
    #[error(
        "the data has {found} rows of seq_len {seq_len}, and a step's batch takes {needed}; \
         give more data, a shorter seq_len, or fewer or smaller microbatches"
    )]
    FewRows {
        /// Rows in the data.
        found: usize,
        /// Rows in a batch.
        needed: usize,
        /// Tokens per row.
        seq_len: usize,
    },
    /// There are fewer rows of validation data than a batch takes.
    #[error(
        "the validation data has {found} rows of seq_len {seq_len}, and a batch takes {needed}; \
         give more validation data or a larger share, a shorter seq_len, or fewer or smaller microbatches"
    )]
    FewValidationRows {
        /// Rows in the validation data.
        found: usize,
        /// Rows in a batch.
        needed: usize,
        /// Tokens per row.
        seq_len: usize,
    },
    /// An evaluation would take more batches than there are.
    #[error(
        "an evaluation takes {asked} batches of {batch_rows} rows, and the validation data has {found}; \
         ask for at most {found} batches, or give more validation data"
    )]
    FewValidationBatches {
        /// Batches of an evaluation.
        asked: usize,
        /// Batches in the validation data.
        found: usize,
        /// Rows in a batch.
        batch_rows: usize,
    },
    /// A share of a text with side inputs should be held out.
    #[error(
        "a share of a text with side inputs cannot be held out, because its rows would be cut at other places; give files \
         of validation data, or the data as a .jsonl file of token ids"
    )]
    SideOfText,
    /// The id that begins documents is not one of the model's.
    #[error(
        "documents begin with the token id {bos}, which lies beyond the vocabulary of {vocab_size}; \
         raise vocab_size, or choose another id"
    )]
    BeginningBeyondVocabulary {
        /// The id.
        bos: u32,
        /// How many ids the model knows.
        vocab_size: usize,
    },
    /// The documents of a text cannot be told apart.
    #[error(
        "{}: the data is text or token ids, whose documents are packed only if it is known where they begin: write `bos_id` in \
         [data], the token id that begins each document", path.display()
    )]
    PackedWithoutBeginning {
        /// The first file.
        path: PathBuf,
    },
    /// There are more rows than an epoch can number.
    #[error("the data has {found} rows, and at most {} can be put in order; use a longer seq_len", u32::MAX)]
    ManyRows {
        /// Rows in the data.
        found: usize,
    },
    /// The model does not know a token.
    #[error(
        "{}:{place}: token id {id} lies beyond the vocabulary of {vocab_size}; raise vocab_size, or correct the data",
        path.display()
    )]
    BeyondVocabulary {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        place: TokenPlace,
        /// The token id.
        id: u64,
        /// How many ids the model knows.
        vocab_size: usize,
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
    /// A file is not compressed as its name says.
    #[error("{}: the name says that the file is {packing}, and its content is not; rename it", path.display())]
    NotPacked {
        /// The file.
        path: PathBuf,
        /// The packing of the name.
        packing: Packing,
    },
    /// A compressed file is damaged or ends early.
    #[error(
        "{}: the {packing} file is damaged or ends early, so nothing of it is used; copy or download it again", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How it is compressed.
        packing: Packing,
        /// The decoder's reason.
        source: std::io::Error,
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
    /// A record cannot be used.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A `tokenizer.json` cannot be used.
    #[error("{}: not a tokenizer.json of Hugging Face (the other choice is \"bytes\")", path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The library was built without tokenizers.
    #[error(
        "{}: tokenizer files are not compiled in; use the tokenizer \"bytes\", or build with the feature `tokenizers` \
         (`cargo build --release --features tokenizers`)",
        path.display()
    )]
    TokenizersNotCompiledIn {
        /// The tokenizer's file.
        path: PathBuf,
    },
    /// A tokenizer is in a form that is not read.
    #[error(
        "{}: the tokenizer is in a form that is not read; write a `tokenizer.json` \
         (`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of transformers), or `tokenizer = \"bytes\"` in [data]",
        path.display()
    )]
    OtherTokenizer {
        /// The file.
        path: PathBuf,
    },
    /// A text could not be turned into tokens.
    #[error("{}{}: the tokenizer cannot turn the text into tokens", path.display(), in_record(*record))]
    Tokenize {
        /// The text's file.
        path: PathBuf,
        /// The place of the text in the file, if the file has records.
        record: Option<RecordPlace>,
        /// The tokenizer's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Tokens could not be turned into a text.
    #[error("{}: the tokenizer cannot turn the tokens into text", path.display())]
    Detokenize {
        /// The tokenizer's file.
        path: PathBuf,
        /// The tokenizer's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The data would take more memory than it may.
    #[error(
        "{}: reading this file takes {}, and {} of the memory for data are left (half of what this machine has \
         available); give less data, or use a machine with more memory", path.display(), Size(*bytes), Size(*left)
    )]
    Memory {
        /// The first file that does not fit.
        path: PathBuf,
        /// The bytes that it takes, as far as they are known.
        bytes: u64,
        /// The bytes that are left after the files before it.
        left: u64,
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
    /// A cursor does not belong to this data.
    #[error(
        "row {index} of an epoch is asked for, and the data has {rows}; resume with the data of the first run"
    )]
    Cursor {
        /// The cursor's row.
        index: u64,
        /// Rows in the data.
        rows: usize,
    },
}

pipewright_schedule::message_as_debug!(DataError);

/// The place of a token in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenPlace {
    /// A byte of a text, counted from 0.
    Byte(u64),
    /// A line of a `.jsonl` file, counted from 1.
    Line(u64),
    /// A token of a tokenized text or of a file of ids, counted from 0.
    Token(u64),
    /// A row of a Parquet file, counted from 1.
    Row(u64),
}

impl fmt::Display for TokenPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Byte(byte) => write!(f, " byte {byte}"),
            Self::Line(line) => write!(f, "{line}"),
            Self::Token(token) => write!(f, " token {token}"),
            Self::Row(row) => write!(f, " row {row}"),
        }
    }
}

fn in_record(record: Option<RecordPlace>) -> String {
    record.map_or_else(String::new, |record| record.to_string())
}
