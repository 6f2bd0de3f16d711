//! The errors of records, with the file and the place in it.

use std::fmt;
use std::path::PathBuf;

use pipewright_system::bounded_file::Size;
use thiserror::Error;

use crate::chat::error::ChatProblem;
use crate::settings::record::RecordKind;

/// A record that cannot be used.
#[derive(Error)]
#[error("{}{place}: {problem}", path.display())]
pub struct RecordError {
    /// The file.
    pub path: PathBuf,
    /// The place of the record in the file.
    pub place: RecordPlace,
    /// The problem.
    pub problem: RecordProblem,
}

pipewright_schedule::message_as_debug!(RecordError);

/// The place of a record in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordPlace {
    /// A line, counted from 1.
    Line(u64),
    /// A row of a Parquet file, counted from 1.
    Row(u64),
}

impl fmt::Display for RecordPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, ":{line}"),
            Self::Row(row) => write!(f, ": row {row}"),
        }
    }
}

/// Why a record cannot be used.
#[derive(Error)]
pub enum RecordProblem {
    /// A line is not JSON.
    #[error(
        "column {column}: not JSON: {reason}; write one record per line, such as {{\"text\": \"to be\"}}, or an array of \
         token ids"
    )]
    NotJson {
        /// The column, counted from 1.
        column: usize,
        /// The parser's reason.
        reason: String,
    },
    /// A line is JSON, but neither a record nor an array.
    #[error(
        "the line is a {found}; write a record such as {{\"text\": \"to be\"}}, or an array of token ids"
    )]
    NoRecord {
        /// The type of the value.
        found: String,
    },
    /// No key of a record is known.
    #[error(
        "the record has {}, and none of the keys that say what it contains: `messages`, `prompt` and `completion`, \
         `instruction` and `output`, or `text`; name other keys with `data.keys`, such as `keys = {{ text = \"content\" }}`",
        keys_in_words(found)
    )]
    NoKnownKey {
        /// The keys of the record.
        found: Vec<String>,
    },
    /// A record has other keys than the records before it.
    #[error(
        "the record contains {found}, and the records before it in the file contain {expected}; split the file"
    )]
    OtherKind {
        /// The content of the first record.
        expected: RecordKind,
        /// The content of this record.
        found: RecordKind,
    },
    /// A line is an array of token ids, and others are records.
    #[error("the file has both records and arrays of token ids; split the file")]
    RecordsAndIds,
    /// A chat or a completion cannot be used.
    #[error(transparent)]
    Chat(#[from] ChatProblem),
    /// A chat or a completion has more tokens than a row takes.
    #[error(
        "the record has {found} tokens, and a row of seq_len {seq_len} takes {}; raise seq_len, or write \
         `long_records = \"cut\"` or \"skip\" in [data]", seq_len + 1
    )]
    Long {
        /// Tokens of the record.
        found: usize,
        /// Tokens per row that the model receives.
        seq_len: usize,
    },
    /// The prompt of a record fills a row, and its end is left out.
    #[error(
        "after the cut to the {} tokens of a row of seq_len {seq_len}, nothing of the record counts in the loss; raise \
         seq_len, or write `long_records = \"skip\"` in [data]", seq_len + 1
    )]
    NothingLeft {
        /// Tokens per row that the model receives.
        seq_len: usize,
    },
    /// A record is larger than the memory that is left for data.
    #[error(
        "the record has more than the {} of the memory for data that are left (half of what this machine has available); \
         give less data, or use a machine with more memory", Size(*left)
    )]
    Memory {
        /// The bytes that are left.
        left: u64,
    },
    /// The value of a key is not a text.
    #[error(
        "`{key}` is not a text but a value of the type {found}; correct the record, or name another key with `data.keys`"
    )]
    NotText {
        /// The key.
        key: String,
        /// The type of the value.
        found: String,
    },
}

pipewright_schedule::message_as_debug!(RecordProblem);

fn keys_in_words(keys: &[String]) -> String {
    match keys {
        [] => "no keys".to_owned(),
        keys => {
            format!("the keys {}", keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", "))
        }
    }
}
