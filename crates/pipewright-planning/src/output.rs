//! Writes a command's data to a file or to standard output.

use std::borrow::Cow;
use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use pipewright_document::text::escape;
use pipewright_system::bounded_file::{write_fresh, write_regular};

use crate::browser;
use crate::failure::Failure;
use crate::screen::say;

/// The file that a command writes, if one is named.
#[derive(Debug, Args)]
pub struct OutputFile {
    /// The file to write; without it, or with -, standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl OutputFile {
    /// Returns the file, if one is named.
    pub fn path(&self) -> Option<&Path> {
        self.output.as_deref().filter(|path| *path != Path::new("-"))
    }

    /// Writes `text` to the file, or to standard output if none is named.
    pub fn write(&self, text: &str) -> Result<(), Failure> {
        write(self.output.as_deref(), text)
    }
}

/// The file that a command writes a page to, and whether the page is opened.
#[derive(Debug, Args)]
pub struct PageOutput {
    #[command(flatten)]
    output: OutputFile,
    /// Open the page in a browser: $BROWSER, or the browser of the desktop. Without -o, its file has a name
    /// that the command prints
    #[arg(long)]
    open: bool,
}

impl PageOutput {
    /// Returns whether the page is opened.
    pub fn is_opened(&self) -> bool {
        self.open
    }

    /// Returns the file of the page: the named one, or `unnamed` if the page is opened or if `flag`, which is
    /// given, needs a file. `None` is standard output.
    ///
    /// # Errors
    /// When a file is needed, and the page is to be written to standard output.
    pub fn file(
        &self,
        flag: Option<&str>,
        unnamed: impl FnOnce() -> PathBuf,
    ) -> Result<Option<PathBuf>, Failure> {
        let flag = flag.or(self.open.then_some("--open"));
        match (self.output.path(), flag) {
            (Some(path), _) => Ok(Some(path.to_owned())),
            (None, Some(flag)) if self.output.output.is_some() => {
                Err(Failure::input(format!("{flag} needs a file, and -o - is standard output; name a file")))
            }
            (None, Some(_)) => Ok(Some(unnamed())),
            (None, None) => Ok(None),
        }
    }

    /// Writes the page to a file or to standard output, and opens the file if this is asked for.
    pub fn write_to(&self, file: Option<&Path>, text: &str) -> Result<(), Failure> {
        match file.filter(|_| self.output.path().is_none()) {
            Some(unnamed) => {
                // Only a file that the user names may be a pipe.
                write_regular(unnamed, text.as_bytes()).map_err(unwritable(unnamed))?;
                say(&format!("wrote {}", unnamed.display()));
            }
            None => write(file, text)?,
        }
        match file.filter(|_| self.open) {
            Some(file) => browser::open(file),
            None => Ok(()),
        }
    }

    /// Writes the page to where the arguments say; [`Self::file`] says what `unnamed` is.
    pub fn write(&self, text: &str, unnamed: impl FnOnce() -> PathBuf) -> Result<(), Failure> {
        self.write_to(self.file(None, unnamed)?.as_deref(), text)
    }
}

/// Returns the file of a page about a schedule that no file is named for.
pub fn page_of(schedule: &str, extension: &str) -> PathBuf {
    format!("pipewright-{schedule}.{extension}").into()
}

/// Writes a text for people to standard output, with control characters as escapes.
pub fn show(text: &str) -> Result<(), Failure> {
    write(None, &escape(text))
}

/// Writes `text` to `file` and prints the file's path, or writes it to standard output if there is no file or
/// its name is `-`. Succeeds even if the reader of standard output closes it early. On a terminal, control
/// characters are shown as escapes; files and pipes get the data as it is.
pub fn write(file: Option<&Path>, text: &str) -> Result<(), Failure> {
    let Some(path) = file.filter(|path| *path != Path::new("-")) else {
        let mut out = std::io::stdout().lock();
        let text = if out.is_terminal() { escape(text) } else { Cow::Borrowed(text) };
        return match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(Failure::unwritten(Path::new("standard output"), &error, "choose another place"))
            }
            _ => Ok(()),
        };
    };
    write_file(path, text)?;
    say(&format!("wrote {}", path.display()));
    Ok(())
}

/// Replaces a file by one with this text, in one step, so that a reader never finds a part of it.
pub fn replace_file(path: &Path, text: &str) -> Result<(), Failure> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    let part = path.with_file_name(name);
    write_fresh(&part, text.as_bytes()).map_err(unwritable(&part))?;
    std::fs::rename(&part, path).map_err(|error| {
        Failure::input(format!("{}: cannot be replaced: {error}; choose another file", path.display()))
    })
}

/// Writes `text` to a file, or leaves no part of it there. The caller prints its path.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    let mut file = File::create(path).map_err(unwritable(path))?;
    file.write_all(text.as_bytes()).map_err(|error| {
        if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            // Best effort: the error is reported in any case.
            let _ = std::fs::remove_file(path);
        }
        unwritable(path)(error)
    })
}

/// Returns a function for `map_err` that adds the path to a failed write.
fn unwritable(path: &Path) -> impl FnOnce(std::io::Error) -> Failure {
    move |error| Failure::unwritten(path, &error, "choose another file")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opening a pipe would wait for its reader. Only a file that the user names may be one.
    #[test]
    #[cfg(unix)]
    fn a_page_with_the_name_by_default_is_not_written_to_a_pipe() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let pipe = folder.path().join("report.html");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
        assert!(made.success());
        let output = PageOutput { output: OutputFile { output: None }, open: true };
        let failure = output.write("", || pipe.clone()).expect_err("a pipe");
        let expected = format!("{}: cannot be written: this is a device or a pipe;", pipe.display());
        assert!(failure.text().starts_with(&expected), "{}", failure.text());
    }
}
