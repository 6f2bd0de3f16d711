//! Schedules in files: reading their text, and saying where in it a mistake is.

use std::path::Path;

use pipewright::bounded_file::read_text;
use pipewright_schedule::csv::{CsvError, QUOTED_CELL};
use pipewright_schedule::{Level, Program};

use crate::config::pipeline::LARGEST_SCHEDULE;
use crate::failure::Failure;

/// Returns the text of a schedule's file.
pub(super) fn read(file: &Path) -> Result<String, Failure> {
    read_text(file, LARGEST_SCHEDULE)
        .map_err(|error| Failure::input(format!("{}: cannot read the schedule: {error}", file.display())))
}

/// An error of a schedule's file, with the file's name in front and the place in the form that editors know.
pub(super) fn locate(file: &Path, error: &CsvError) -> String {
    match error {
        CsvError::Cell { line, column, source } => format!("{}:{line}:{column}: {source}", file.display()),
        CsvError::Quote { line, column } => format!("{}:{line}:{column}: {QUOTED_CELL}", file.display()),
        CsvError::Rows(error) => format!("{}: {error}", file.display()),
    }
}

/// The least level at which the program can be sound.
pub(super) fn implied_level(program: &Program) -> Level {
    let sends = program.rows().iter().flatten().any(|action| action.is_communication());
    if sends { Level::Comms } else { Level::Compute }
}
