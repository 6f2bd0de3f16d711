//! The commands that need no training, for `python -m pipewright_pp`.

use std::ffi::OsString;
use std::io::Write;

use clap::Parser;
use pipewright_planning::argument_values::shortened_error;
use pipewright_planning::configurations::NoConfigurations;
use pipewright_planning::{Command, failure, panic, screen};
use pipewright_system::failure::exit_codes;
use pyo3::prelude::*;

/// The name by which the command is run.
const NAME: &str = "python -m pipewright_pp";

/// Proves, predicts, plans and draws pipeline-parallel training.
#[derive(Debug, Parser)]
#[command(
    name = NAME, bin_name = NAME, version, max_term_width = 100, after_help = exit_codes(),
    after_long_help = format!("{}\n\nIn the examples of commands, `pipewright` stands for `{NAME}`.", exit_codes())
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Print errors only
    #[arg(short, long, global = true)]
    quiet: bool,
}

/// Runs a command without the interpreter's lock, and returns the exit code of the process.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| {
        let words = [OsString::from(NAME)].into_iter().chain(arguments);
        let arguments = match Arguments::try_parse_from(words) {
            Ok(arguments) => arguments,
            Err(error) => {
                let error = shortened_error(error);
                // If the stream is closed, the text cannot be shown anywhere.
                let _ = error.print();
                let _ = std::io::stdout().flush();
                return u8::try_from(error.exit_code()).unwrap_or(2);
            }
        };
        screen::set_quiet(arguments.quiet);
        match panic::guard(|| arguments.command.run(&NoConfigurations)) {
            Ok(()) => 0,
            Err(failed) => {
                failure::report(&failed);
                failed.kind.exit_code()
            }
        }
    })
}
