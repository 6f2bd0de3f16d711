//! The error of training data: where the fault is, what it is, and its cause.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why training data cannot be read, rendered or written.
#[derive(thiserror::Error)]
pub struct DataError {
    /// The file with the fault, or the pattern of files; `None` if it is in no file alone.
    pub path: Option<PathBuf>,
    /// The place in the file.
    pub place: Option<DataPlace>,
    /// The kind of fault.
    pub kind: DataErrorKind,
    problem: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

pipewright_schedule::message_as_debug!(DataError);

/// The kinds of faults that callers treat in different ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataErrorKind {
    /// The files or the settings cannot be used as they are.
    Unusable,
    /// The caller stopped the work before the file was complete.
    Stopped,
    /// A record cannot be used; other records of the data may be.
    BadRecord,
    /// There is no chat template.
    NoTemplate,
    /// A chat template takes more steps, or makes larger values, than a limit allows.
    Exhausted,
}

/// A place in a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPlace {
    /// A byte of a text, counted from 0.
    Byte(u64),
    /// A line of a `.jsonl` file, counted from 1.
    Line(u64),
    /// A column of a line of a `.jsonl` file or a JSON list, both counted from 1.
    Column(u64, usize),
    /// A token of a tokenized text or of a file of ids, counted from 0.
    Token(u64),
    /// A row of a Parquet file, counted from 1.
    Row(u64),
    /// A record of a file of `pipewright tokenize`, counted from 1.
    Record(u64),
}

impl fmt::Display for DataPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Byte(byte) => write!(f, "byte {byte}"),
            Self::Line(line) => write!(f, "{line}"),
            Self::Column(line, column) => write!(f, "{line}:{column}"),
            Self::Token(token) => write!(f, "token {token}"),
            Self::Row(row) => write!(f, "row {row}"),
            Self::Record(record) => write!(f, "record {record}"),
        }
    }
}

impl fmt::Display for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "{}", path.display())?;
            match self.place {
                Some(place @ (DataPlace::Line(_) | DataPlace::Column(..))) => write!(f, ":{place}")?,
                Some(place) => write!(f, ": {place}")?,
                None => {}
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.problem)
    }
}

impl DataError {
    /// Returns the error of data that is in no file alone, with a sentence of what is wrong and what to do.
    pub fn new(problem: impl Into<String>) -> Self {
        Self { path: None, place: None, kind: DataErrorKind::Unusable, problem: problem.into(), source: None }
    }

    /// Returns the error of a file.
    pub(crate) fn of(path: &Path, problem: impl Into<String>) -> Self {
        Self { path: Some(path.to_owned()), ..Self::new(problem) }
    }

    /// Returns the error of a file or folder that the system does not read.
    pub(crate) fn unreadable(path: &Path, source: io::Error) -> Self {
        Self::of(path, "cannot be read").caused_by(source)
    }

    /// Adds the place in a file.
    pub(crate) fn at(self, path: &Path, place: DataPlace) -> Self {
        Self { path: Some(path.to_owned()), place: Some(place), ..self }
    }

    /// Adds the place of a record that cannot be used. An error of another kind keeps it.
    pub(crate) fn of_record(self, path: &Path, place: DataPlace) -> Self {
        let kind = if self.kind == DataErrorKind::Unusable { DataErrorKind::BadRecord } else { self.kind };
        self.at(path, place).of_kind(kind)
    }

    /// Adds a sentence to the problem.
    pub(crate) fn and(self, sentence: &str) -> Self {
        Self { problem: format!("{}; {sentence}", self.problem), ..self }
    }

    /// Adds the cause.
    pub(crate) fn caused_by(self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { source: Some(source.into()), ..self }
    }

    /// Changes the kind.
    pub(crate) fn of_kind(self, kind: DataErrorKind) -> Self {
        Self { kind, ..self }
    }
}
