//! Schedules in files: reading their text, and saying where in it a mistake is.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use pipewright_schedule::csv::CsvError;
use pipewright_schedule::{Level, Program};

use crate::failure::Failure;

/// The largest file that is read: room for the largest program there is to run, and an end to files that have none.
const MAX_BYTES: u64 = 1 << 30;

/// The text of a schedule's file.
pub(super) fn read(file: &Path) -> Result<String, Failure> {
    let refused = |why: String| Failure::input(format!("{}: {why}", file.display()));
    let mut text = String::new();
    File::open(file)
        .and_then(|opened| opened.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(|error| refused(format!("cannot read the schedule: {error}; name a readable CSV file")))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(refused(format!("the file has more than {MAX_BYTES} bytes; use a smaller schedule")));
    }
    Ok(text)
}

/// An error of a schedule's file, with the file's name in front and the place in the form that editors know.
pub(super) fn locate(file: &Path, error: &CsvError) -> String {
    match error {
        CsvError::Cell { line, column, source } => format!("{}:{line}:{column}: {source}", file.display()),
        CsvError::Rows(error) => format!("{}: {error}", file.display()),
    }
}

/// The least level at which the program can be sound.
pub(super) fn implied_level(program: &Program) -> Level {
    let sends = program.rows().iter().flatten().any(|action| action.is_communication());
    if sends { Level::Comms } else { Level::Compute }
}
