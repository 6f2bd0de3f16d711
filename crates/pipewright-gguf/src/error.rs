//! The error of a GGUF file.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a GGUF file cannot be used.
#[derive(Error)]
#[error("{}: {fault}", path.display())]
pub struct GgufError {
    path: PathBuf,
    fault: String,
    source: Option<io::Error>,
}

pipewright_schedule::message_as_debug!(GgufError);

impl GgufError {
    /// Returns the error of a fault of a file. Control characters, which names in the file may have, are escaped.
    pub(crate) fn at(path: &Path, fault: impl Into<String>) -> Self {
        let shown =
            |char: char| if char.is_control() { char.escape_debug().to_string() } else { char.to_string() };
        let fault = fault.into().chars().map(shown).collect();
        Self { path: path.to_owned(), fault, source: None }
    }

    /// Returns a function for `map_err` that adds the path to the system's reason.
    pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self { path: path.to_owned(), fault: "cannot read it".to_owned(), source: Some(source) }
    }
}

impl From<GgufError> for io::Error {
    fn from(error: GgufError) -> Self {
        let text = match &error.source {
            Some(source) => format!("{error}: {source}"),
            None => error.fault,
        };
        Self::new(io::ErrorKind::InvalidData, text)
    }
}
