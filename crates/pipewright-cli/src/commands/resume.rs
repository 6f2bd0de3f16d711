//! `pipewright resume`: resumes a run from its newest checkpoint, or from the checkpoint that a path names.
//! The settings may be changed.

use std::path::PathBuf;

use clap::Args;
use pipewright_planning::failure::Failure;
use pipewright_run::run::Run;

use crate::keys::keys;
use crate::terminal::Terminal;

/// The arguments of `pipewright resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArguments {
    /// The folder of the run, to resume from its newest checkpoint, or one of its checkpoints
    #[arg(value_name = "RUN_DIR")]
    pub(crate) run: PathBuf,
    /// Override a key of the run's configuration
    #[arg(long, value_name = "section.key=value", value_parser = keys(), hide_possible_values = true)]
    pub(crate) set: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(arguments: &ResumeArguments) -> Result<(), Failure> {
    Run::reopen(&arguments.run).set(&arguments.set).observer(Terminal::of_training()).train()
}
