//! The error of a GGUF file.

use std::io;
use std::path::{Path, PathBuf};

use pipewright_document::text::escape;
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
        // The fault is one line, also if a name has several.
        let fault = escape(&fault.into()).replace('\n', "\\n").replace('\t', "\\t");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_file_cannot_change_a_terminal_or_the_line() {
        let error = GgufError::at(Path::new("a.gguf"), "the tensor `a\u{1b}[2J\n\tb\u{202e}c é`");
        assert_eq!(error.to_string(), r"a.gguf: the tensor `a\u{1b}[2J\n\tb\u{202e}c é`");
    }
}
