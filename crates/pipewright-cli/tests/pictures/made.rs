//! Runs the binary to make pictures in a scratch folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A picture in a file.
pub(crate) struct Made {
    folder: TempDir,
    name: &'static str,
}

impl Made {
    /// Runs `pipewright` with these arguments, separated by spaces, and `--format` with this format.
    pub(crate) fn new(arguments: &str, format: &str) -> Self {
        let name = if format == "html" { "picture.html" } else { "picture.svg" };
        let made = Self { folder: tempfile::tempdir().expect("a scratch folder"), name };
        let output = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"))
            .args(arguments.split(' '))
            .args(["--format", format, "-o"])
            .arg(made.path())
            .output()
            .expect("the binary starts");
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        made
    }

    pub(crate) fn page(arguments: &str) -> Self {
        Self::new(arguments, "html")
    }

    pub(crate) fn path(&self) -> PathBuf {
        Path::new(self.folder.path()).join(self.name)
    }
}
