//! A file of another system that the user names, with the table of actions that it may name.

use std::fmt::Display;
use std::path::Path;

use pipewright_cluster::judge::Configuration;
use pipewright_schedule::footprint::Use;
use pipewright_system::bounded_file::{SMALL_TEXT, read_text};
use pipewright_system::schedule_file::read_regular;
use pipewright_system::schedule_memory::check_text;

use crate::failure::{Failure, sentence};

/// A file that was read.
pub(crate) struct GivenFile {
    pub(crate) configuration: Configuration,
    /// The text of the table of actions.
    pub(crate) table: Option<String>,
}

impl GivenFile {
    /// Reads a file, and the table that it names.
    pub(crate) fn read(file: &Path) -> Result<Self, Failure> {
        let text =
            read_text(file, SMALL_TEXT).map_err(|error| wrong(file, format!("cannot be read: {error}")))?;
        let configuration = Configuration::parse(&file.to_string_lossy(), &text)
            .map_err(|error| wrong(file, sentence(&error)))?;
        let table = configuration.table_path(file).map(|path| read_regular(&path));
        let table = table.transpose().map_err(Failure::input)?;
        if let Some(table) = &table {
            check_text(table, Use::Plan)?;
        }
        Ok(Self { configuration, table })
    }
}

/// Returns the failure of a mistake in a file.
pub(crate) fn wrong(file: &Path, mistake: impl Display) -> Failure {
    Failure::input(format!("{}: {mistake}", file.display()))
}
