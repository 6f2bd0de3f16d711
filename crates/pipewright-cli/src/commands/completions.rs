//! `pipewright completions`: a script that completes the command's arguments in a shell.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::output::OutputFile;

/// The arguments of `pipewright completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
    #[command(flatten)]
    output: OutputFile,
}

/// Runs the command.
pub(crate) fn run(arguments: &CompletionsArguments) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "pipewright", &mut script);
    arguments.output.write(&String::from_utf8_lossy(&script))
}
