//! Reads the text of schedules in files, and locates mistakes in it.

use std::io;
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{read_regular_text, read_text};
use pipewright_schedule::csv::{CsvError, QUOTED_CELL};
use thiserror::Error;

use crate::schedule_memory::OutOfMemory;

/// The largest file that is read: enough for the largest program that can run.
const LARGEST_SCHEDULE: u64 = 1 << 30;

/// The reason why a file cannot be used as a schedule.
#[derive(Debug, Error)]
pub(crate) enum ScheduleFileError {
    /// The file cannot be read.
    #[error("{}: cannot read the schedule: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The schedule does not fit into memory.
    #[error("{source}")]
    Memory {
        /// The numbers.
        #[from]
        source: OutOfMemory,
    },
    /// The text is not a schedule.
    #[error("{}", locate(path, source))]
    Csv {
        /// The file.
        path: PathBuf,
        /// The mistake and its place.
        source: CsvError,
    },
}

/// Returns the text of a schedule's file, which may be a pipe.
pub(crate) fn read(file: &Path) -> Result<String, ScheduleFileError> {
    read_text(file, LARGEST_SCHEDULE)
        .map_err(|source| ScheduleFileError::Read { path: file.to_owned(), source })
}

/// Returns the text of a schedule's file, which must be a regular file.
pub(crate) fn read_regular(file: &Path) -> Result<String, ScheduleFileError> {
    read_regular_text(file, LARGEST_SCHEDULE)
        .map_err(|source| ScheduleFileError::Read { path: file.to_owned(), source })
}

/// Returns the message of an error in a schedule's file, with its place in a form that editors recognize.
pub(crate) fn locate(file: &Path, error: &CsvError) -> String {
    match error {
        CsvError::Cell { line, column, source } => format!("{}:{line}:{column}: {source}", file.display()),
        CsvError::Quote { line, column } => format!("{}:{line}:{column}: {QUOTED_CELL}", file.display()),
        CsvError::Rows(error) => format!("{}: {error}", file.display()),
    }
}
