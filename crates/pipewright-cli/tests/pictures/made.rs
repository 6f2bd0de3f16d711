//! Runs the binary to make pictures in a scratch folder.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use pipewright_schedule::picture::{PictureSettings, RecordedStep, TimeUnit, View, view};
use pipewright_schedule::simulate::timed;
use pipewright_schedule::{Costs, Program};
use tempfile::TempDir;

use crate::turns::SharedTurn;

/// A picture in a file.
pub(crate) struct Made {
    folder: TempDir,
    name: &'static str,
}

impl Made {
    /// Runs `pipewright` with these arguments, separated by spaces, and `--format` with this format.
    pub(crate) fn new(arguments: &str, format: &str) -> Self {
        let name = if format == "html" { "picture.html" } else { "picture.svg" };
        Self::run(&format!("{arguments} --format {format}"), name)
    }

    /// Runs `pipewright view` with these arguments.
    pub(crate) fn view(arguments: &str) -> Self {
        Self::run(&format!("view {arguments}"), "view.html")
    }

    /// Makes the page of a program, with these recorded steps.
    pub(crate) fn explained(program: &Program, costs: &Costs, steps: &[RecordedStep]) -> Self {
        Self::of_base(program, costs, steps, false)
    }

    /// Like [`Made::explained`], for a run that reads its frozen base from a file or has it in memory.
    pub(crate) fn of_base(
        program: &Program,
        costs: &Costs,
        steps: &[RecordedStep],
        reads_base: bool,
    ) -> Self {
        let made = Self { folder: tempfile::tempdir().expect("a scratch folder"), name: "view.html" };
        let run = timed(program, costs).expect("no deadlock");
        let page = view(&View {
            settings: PictureSettings { unit: TimeUnit::Costs, ..PictureSettings::default() },
            predicted: run.timeline(),
            program,
            costs,
            steps,
            left_out: 0,
            whole_step: None,
            other_programs: &[],
            reads_base,
        });
        std::fs::write(made.path(), page).expect("the scratch folder takes files");
        made
    }

    fn run(arguments: &str, name: &'static str) -> Self {
        let made = Self { folder: tempfile::tempdir().expect("a scratch folder"), name };
        pipewright(arguments.split(' ').map(OsStr::new).chain([OsStr::new("-o"), made.path().as_os_str()]));
        made
    }

    pub(crate) fn page(arguments: &str) -> Self {
        Self::new(arguments, "html")
    }

    pub(crate) fn path(&self) -> PathBuf {
        Path::new(self.folder.path()).join(self.name)
    }
}

/// Runs `pipewright` and returns its standard output. A failure of the command fails the test.
pub(crate) fn pipewright<'a>(arguments: impl IntoIterator<Item = &'a OsStr>) -> String {
    let _turn = SharedTurn::begin();
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    let output = command.args(arguments).output().expect("the binary starts");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
