//! Writes a command's data to a file or to standard output.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::Failure;

/// The file that a command writes, if one is named.
#[derive(Debug, Args)]
pub(crate) struct OutputFile {
    /// The file to write; without it, or with -, standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl OutputFile {
    /// Returns the file, if one is named.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.output.as_deref().filter(|path| *path != Path::new("-"))
    }

    /// Writes `text` to the file, or to standard output if none is named.
    pub(crate) fn write(&self, text: &str) -> Result<(), Failure> {
        write(self.output.as_deref(), text)
    }
}

/// Writes `text` to `file`, or to standard output if there is no file or its name is `-`. Succeeds even if the reader
/// of standard output closes it early.
pub(crate) fn write(file: Option<&Path>, text: &str) -> Result<(), Failure> {
    let Some(path) = file.filter(|path| *path != Path::new("-")) else {
        let mut out = std::io::stdout().lock();
        return match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(Failure::input(format!("standard output cannot be written: {error}")))
            }
            _ => Ok(()),
        };
    };
    let unwritable = |error| format!("{}: cannot be written: {error}; choose another file", path.display());
    std::fs::write(path, text).map_err(|error| Failure::input(unwritable(error)))
}
