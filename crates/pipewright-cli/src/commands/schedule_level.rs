//! The text and the level of a schedule in a file, for several commands.

use std::path::Path;

use pipewright_schedule::{Level, Program};

use crate::failure::Failure;
pub(super) use crate::schedule_file::locate;

/// Returns the text of a schedule's file.
pub(super) fn read(file: &Path) -> Result<String, Failure> {
    crate::schedule_file::read(file).map_err(Failure::input)
}

/// Returns the lowest level at which the program can be sound.
pub(super) fn implied_level(program: &Program) -> Level {
    let sends = program.rows().iter().flatten().any(|action| action.is_communication());
    if sends { Level::Comms } else { Level::Compute }
}
