//! `pipewright train`: trains a run from the first step.

use pipewright_planning::failure::Failure;
use pipewright_run::run::Run;

use crate::commands::run_arguments::RunArguments;
use crate::planning::auto;
use crate::terminal::Terminal;

/// Runs the command.
pub(crate) fn run(arguments: &RunArguments) -> Result<(), Failure> {
    let arguments = arguments.clone();
    Run::load(move || arguments.load()).observer(Terminal::of_training()).planner(auto::choose).train()
}
