//! Schedules in files: reads their text, and locates mistakes in it.

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

/// Returns the message of an error in a schedule's file, with its place in the form that editors know.
pub(super) fn locate(file: &Path, error: &CsvError) -> String {
    match error {
        CsvError::Cell { line, column, source } => format!("{}:{line}:{column}: {source}", file.display()),
        CsvError::Quote { line, column } => format!("{}:{line}:{column}: {QUOTED_CELL}", file.display()),
        CsvError::Rows(error) => format!("{}: {error}", file.display()),
    }
}

/// Returns the lowest level at which the program can be sound.
pub(super) fn implied_level(program: &Program) -> Level {
    let sends = program.rows().iter().flatten().any(|action| action.is_communication());
    if sends { Level::Comms } else { Level::Compute }
}
