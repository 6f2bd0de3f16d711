//! `pipewright validate`: proves a schedule from a file sound, or lists everything that is wrong with it.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use pipewright_schedule::csv::{CsvError, parse_program};
use pipewright_schedule::{Level, Program, ValidatedProgram, Violations, validate};

use crate::failure::{Exit, Failure};
use crate::output;

/// The arguments of `pipewright validate`.
#[derive(Debug, Args)]
pub(crate) struct ValidateArguments {
    /// The schedule: one row a rank
    #[arg(value_name = "FILE.csv")]
    file: PathBuf,
    /// What must be there: compute, comms or full; without it, comms where the file sends or receives, else compute
    #[arg(long)]
    level: Option<Level>,
}

/// Runs the command.
pub(crate) fn run(arguments: &ValidateArguments) -> Result<(), Failure> {
    let program = match read(&arguments.file)? {
        Ok(program) => program,
        Err(error @ CsvError::Cell { .. }) => return Err(Failure::input(locate(&arguments.file, &error))),
        // The cells are actions, but no stage-to-rank map makes them a program: that is a verdict on the schedule.
        Err(error @ CsvError::Rows(_)) => {
            output::write(None, &format!("{error}\n"))?;
            return Err(unsound(&arguments.file, 1));
        }
    };
    let level = arguments.level.unwrap_or_else(|| implied_level(&program));
    match validate(program, level) {
        Ok(program) => output::write(None, &summary(&arguments.file, &program)),
        Err(violations) => {
            output::write(None, &lines(&violations))?;
            Err(unsound(&arguments.file, violations.listed().len() as u64 + violations.omitted()))
        }
    }
}

/// The text of a schedule's file, parsed.
fn read(file: &Path) -> Result<Result<Program, CsvError>, Failure> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| Failure::input(format!("{}: cannot read the schedule: {error}", file.display())))?;
    Ok(parse_program(&text))
}

/// An error of a schedule's file, with the file's name in front and the place in the form that editors know.
pub(super) fn locate(file: &Path, error: &CsvError) -> String {
    match error {
        CsvError::Cell { line, column, source } => format!("{}:{line}:{column}: {source}", file.display()),
        CsvError::Rows(error) => format!("{}: {error}", file.display()),
    }
}

/// The least level at which the program can be sound.
pub(super) fn implied_level(program: &Program) -> Level {
    let sends = program.rows().iter().flatten().any(|action| action.is_communication());
    if sends { Level::Comms } else { Level::Compute }
}

fn unsound(file: &Path, violations: u64) -> Failure {
    let plural = if violations == 1 { "" } else { "s" };
    let name = file.display();
    Failure::new(
        Exit::CheckFailed,
        format!("{name}: the schedule is unsound, {violations} violation{plural}"),
    )
}

fn lines(violations: &Violations) -> String {
    let mut text = String::new();
    for violation in violations.listed() {
        writeln!(text, "{violation}").expect("a string takes all text");
    }
    if violations.omitted() > 0 {
        writeln!(text, "and {} more", violations.omitted()).expect("a string takes all text");
    }
    text
}

fn summary(file: &Path, program: &ValidatedProgram) -> String {
    format!(
        "{}: sound at level {}: {} ranks, {} stages, {} microbatches\n",
        file.display(),
        program.level(),
        program.ranks(),
        program.placement().stages(),
        program.microbatches()
    )
}
