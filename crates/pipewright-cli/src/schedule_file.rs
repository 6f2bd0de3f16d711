//! Schedules in files: reading their text, and saying where in it a mistake is.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use pipewright_schedule::csv::CsvError;
use thiserror::Error;

/// The largest file that is read: room for the largest program there is to run, and an end to files that have none.
const MAX_BYTES: u64 = 1 << 30;

/// Why a schedule cannot be taken from a file.
#[derive(Debug, Error)]
pub(crate) enum ScheduleFileError {
    /// The file cannot be read.
    #[error("{}: cannot read the schedule: {source}; name a readable CSV file", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The file is larger than any schedule that can run.
    #[error("{}: the file has more than {MAX_BYTES} bytes; use a smaller schedule", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The text is not a schedule.
    #[error("{}", locate(path, source))]
    Csv {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: CsvError,
    },
}

/// The text of a schedule's file.
pub(crate) fn read(file: &Path) -> Result<String, ScheduleFileError> {
    let mut text = String::new();
    File::open(file)
        .and_then(|opened| opened.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(|source| ScheduleFileError::Read { path: file.to_owned(), source })?;
    if text.len() as u64 > MAX_BYTES {
        return Err(ScheduleFileError::TooLarge { path: file.to_owned() });
    }
    Ok(text)
}

/// An error of a schedule's file, with the file's name in front and the place in the form that editors know.
pub(crate) fn locate(file: &Path, error: &CsvError) -> String {
    match error {
        CsvError::Cell { line, column, source } => format!("{}:{line}:{column}: {source}", file.display()),
        CsvError::Rows(error) => format!("{}: {error}", file.display()),
    }
}
