//! The text of a schedule in a file, for several commands.

use std::path::Path;

use crate::failure::Failure;
pub(super) use crate::schedule_file::locate;

/// Returns the text of a schedule's file.
pub(super) fn read(file: &Path) -> Result<String, Failure> {
    crate::schedule_file::read(file).map_err(Failure::input)
}
