//! Reads the text of a configuration or a profile, and names what is wrong with either.

use std::path::{Path, PathBuf};

use pipewright_document::{Problems, Source};
use thiserror::Error;

use crate::bounded_file::{SMALL_TEXT, read_text};

/// The reason why there is no configuration, or no profile.
#[derive(Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the {what}", path.display())]
    Read {
        /// The kind of file: a configuration or a profile.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file or the arguments contain mistakes.
    #[error(transparent)]
    Problems(Problems),
}

pipewright_schedule::message_as_debug!(ConfigError);

/// Refuses a path that is not UTF-8, because the effective configuration contains paths that begin with it.
fn require_utf8(path: &Path) -> std::io::Result<()> {
    match path.to_str() {
        Some(_) => Ok(()),
        None => Err(std::io::Error::new(
            std::io::ErrorKind::InvalidData,
            "the path is not UTF-8; rename the file or its folder",
        )),
    }
}

/// Reads a file of the kind `what`.
///
/// # Errors
/// When the file cannot be read, or is larger than [`SMALL_TEXT`].
pub fn read_source(path: &Path, what: &'static str) -> Result<Source, ConfigError> {
    let text = require_utf8(path)
        .and_then(|()| read_text(path, SMALL_TEXT))
        .map_err(|source| ConfigError::Read { what, path: path.to_owned(), source })?;
    // The mark of some editors at the beginning is not part of the first line.
    let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
    Ok(Source { name: path.display().to_string(), text })
}
