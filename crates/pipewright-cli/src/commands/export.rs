//! `pipewright export`: a checkpoint's model as a Hugging Face directory.

use std::path::PathBuf;

use clap::Args;
use pipewright_models::ModelConfig;

use crate::commands::checkpoint_path;
use crate::commands::run_identity::MODEL;
use crate::display;
use crate::failure::Failure;

/// The arguments of `pipewright export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// A run's folder, whose newest checkpoint is meant, or a checkpoint's
    #[arg(value_name = "CHECKPOINT_OR_RUN")]
    from: PathBuf,
    /// The folder to write; it must not exist, or be empty
    #[arg(value_name = "DIR")]
    to: PathBuf,
}

/// Runs the command.
pub(crate) fn run(arguments: &ExportArguments) -> Result<(), Failure> {
    let checkpoint = checkpoint_path::open(&arguments.from)?;
    let place = checkpoint.path().display();
    let Some(model) = checkpoint.manifest().description.get(MODEL).cloned() else {
        return Err(Failure::input(format!(
            "{place}: the checkpoint does not say which model it holds; export a checkpoint that pipewright train wrote"
        )));
    };
    let model = ModelConfig::from_json(model).map_err(|error| Failure::input(format!("{place}: {error}")))?;
    model.export(&checkpoint, &arguments.to).map_err(Failure::input)?;
    let (step, to) = (checkpoint.step(), arguments.to.display());
    display::say(&format!("wrote the model of step {step} to {to}; its tokenizer is not in a checkpoint"));
    Ok(())
}
