//! `pipewright export`: writes a checkpoint's model as a Hugging Face directory.

use std::path::PathBuf;

use clap::Args;
use pipewright_models::{ModelConfig, hf};

use crate::commands::run_identity::MODEL;
use crate::commands::{checkpoint_path, origin};
use crate::display;
use crate::failure::{Failure, sentence};

/// The arguments of `pipewright export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// A run's folder, for its newest checkpoint, or a checkpoint's folder
    #[arg(value_name = "CHECKPOINT_OR_RUN")]
    from: PathBuf,
    /// The folder to write; it must be empty or not exist
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
    let model = ModelConfig::from_json(model)
        .map_err(|error| Failure::input(format!("{place}: the checkpoint's model: {}", sentence(&error))))?;
    let origin = origin::of_checkpoint(&checkpoint);
    model.export(&checkpoint, origin.as_deref(), &arguments.to).map_err(Failure::input)?;
    let (step, to) = (checkpoint.step(), arguments.to.display());
    let tokenizer = match arguments.to.join(hf::TOKENIZER).is_file() {
        true => "with its tokenizer",
        false => "without a tokenizer: the folder of the run has no model/tokenizer.json",
    };
    if let Some(flaws) = checkpoint_path::not_finite(&checkpoint) {
        display::say(&format!("warning: {flaws}"));
    }
    display::say(&format!("wrote the model of step {step} to {to}, {tokenizer}"));
    Ok(())
}
