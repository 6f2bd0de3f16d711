//! `pipewright export`: writes a checkpoint's model as a Hugging Face directory.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright_models::hf::{ExportOptions, WeightType};
use pipewright_models::{ModelConfig, hf};

use crate::display;
use crate::failure::{Failure, sentence};
use crate::training::identity::MODEL;
use crate::training::{checkpoint_path, origin};

/// The arguments of `pipewright export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// A run's folder, for its newest checkpoint, or a checkpoint's folder
    #[arg(value_name = "CHECKPOINT_OR_RUN")]
    from: PathBuf,
    /// The folder to write; it must be empty or not exist
    #[arg(value_name = "DIR")]
    to: PathBuf,
    /// The element type of the weights; by default, the type of the model that training started from, or
    /// float32
    #[arg(long, value_enum)]
    dtype: Option<ElementType>,
}

/// The element types of weights in files.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ElementType {
    /// 32 bits
    Float32,
    /// 16 bits with the range of float32
    Bfloat16,
    /// 16 bits, up to 65504
    Float16,
}

impl From<ElementType> for WeightType {
    fn from(kind: ElementType) -> Self {
        match kind {
            ElementType::Float32 => Self::Float32,
            ElementType::Bfloat16 => Self::Bfloat16,
            ElementType::Float16 => Self::Float16,
        }
    }
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
    let options =
        ExportOptions { origin: origin.as_deref(), weight_type: arguments.dtype.map(WeightType::from) };
    let kind = model.export(&checkpoint, &options, &arguments.to).map_err(Failure::input)?;
    let (step, to) = (checkpoint.step(), arguments.to.display());
    let tokenizer = if arguments.to.join(hf::TOKENIZER).is_file() {
        "with its tokenizer"
    } else {
        "without a tokenizer: the folder of the run has no model/tokenizer.json"
    };
    if let Some(flaws) = checkpoint_path::not_finite(&checkpoint) {
        display::say(&format!("warning: {flaws}"));
    }
    display::say(&format!("wrote the model of step {step} in {} to {to}, {tokenizer}", kind.name()));
    Ok(())
}
