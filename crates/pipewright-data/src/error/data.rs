//! The errors of reading training data, with the file and the place in it.

use std::path::PathBuf;

use pipewright_system::bounded_file::Size;
use thiserror::Error;

use super::file::FileError;
use super::format::FormatError;
use super::mix::MixError;
use super::token_place::TokenPlace;
use super::tokenized::TokenizedError;
use super::tokenizer::TokenizerError;
use crate::chat::error::TemplateError;
use crate::record_error::RecordError;

/// Why training data cannot be read.
#[derive(Error)]
pub enum DataError {
    /// A file cannot be found or read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The content of a file does not have the form that its reader expects.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A file of token ids cannot be written or read.
    #[error(transparent)]
    Tokenized(#[from] TokenizedError),
    /// The sources of a mixture cannot be used together.
    #[error(transparent)]
    Mix(#[from] MixError),
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
    /// A record cannot be used.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
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
