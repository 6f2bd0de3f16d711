//! `pipewright completions`: prints a script that completes the command's arguments in a shell.

use clap::{Args, Command};
use clap_complete::Shell;
use pipewright_planning::failure::Failure;
use pipewright_planning::output::OutputFile;

/// The arguments of `pipewright completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
    #[command(flatten)]
    output: OutputFile,
}

/// Runs the command; `program` describes the whole command line.
pub(crate) fn run(arguments: &CompletionsArguments, mut program: Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut program, "pipewright", &mut script);
    arguments.output.write(&String::from_utf8_lossy(&script))
}
