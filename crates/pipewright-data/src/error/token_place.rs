//! The place of a token in a file.

use std::fmt;

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
    /// A record of a file of `pipewright tokenize`, counted from 1.
    Record(u64),
}

impl fmt::Display for TokenPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Byte(byte) => write!(f, " byte {byte}"),
            Self::Line(line) => write!(f, "{line}"),
            Self::Token(token) => write!(f, " token {token}"),
            Self::Row(row) => write!(f, " row {row}"),
            Self::Record(record) => write!(f, " record {record}"),
        }
    }
}
