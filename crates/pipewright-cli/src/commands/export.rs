//! `pipewright export`: writes a checkpoint's model as a Hugging Face directory, or its adapters as a PEFT
//! directory.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright::checkpoint::Checkpoint;
use pipewright_models::hf::{ExportOptions, PeftLimit, WeightType};
use pipewright_models::{AdaptedCheckpoint, ModelConfig, hf};
use pipewright_planning::failure::Failure;
use pipewright_planning::screen::say;
use pipewright_run::training::run_adapter::StoredAdapter;
use pipewright_run::training::trained_model::{base_of_run, model_of};
use pipewright_run::training::{checkpoint_path, origin};

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
    /// Add the adapters that the run trained to their base, and write the whole model
    #[arg(long)]
    merge: bool,
    /// The folder of the base of the adapters, if it is not where the run found it
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
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
    let model = model_of(&checkpoint)?;
    let adapter = StoredAdapter::of(&checkpoint)?;
    if adapter.is_none() && arguments.merge {
        return Err(Failure::input(format!(
            "{place}: the run trained the whole model and has no adapters: leave out --merge"
        )));
    }
    let (step, to) = (checkpoint.step(), arguments.to.display());
    let flaws = checkpoint_path::not_finite(&checkpoint);
    let warning = flaws.map(|flaws| format!("warning: {flaws}"));
    if let Some(adapter) = adapter.as_ref().filter(|_| !arguments.merge) {
        write_adapter(arguments, &checkpoint, &model, adapter)?;
        warning.iter().for_each(|warning| say(warning));
        return Ok(());
    }
    let origin = origin::of_checkpoint(&checkpoint);
    let options =
        ExportOptions { origin: origin.as_deref(), weight_type: arguments.dtype.map(WeightType::from) };
    let kind = match &adapter {
        Some(adapter) => {
            let base = adapter.base(arguments.base.as_deref(), base_of_run(&checkpoint)?)?;
            let adapted = AdaptedCheckpoint { checkpoint: &checkpoint, lora: &adapter.lora, base: &base };
            model.export_merged(adapted, &options, &arguments.to)
        }
        None => model.export(&checkpoint, &options, &arguments.to),
    };
    let kind = kind.map_err(Failure::input)?;
    let tokenizer = if arguments.to.join(hf::TOKENIZER).is_file() {
        "with its tokenizer"
    } else {
        "without a tokenizer: the folder of the run has no model/tokenizer.json"
    };
    warning.iter().for_each(|warning| say(warning));
    say(&format!("wrote the model of step {step} in {} to {to}, {tokenizer}", kind.name()));
    Ok(())
}

/// Writes the adapters of a checkpoint as a PEFT directory.
fn write_adapter(
    arguments: &ExportArguments,
    checkpoint: &Checkpoint,
    model: &ModelConfig,
    adapter: &StoredAdapter,
) -> Result<(), Failure> {
    if arguments.dtype.is_some() {
        return Err(Failure::input(
            "adapters are written as float32: leave out --dtype, or write the whole model with --merge",
        ));
    }
    let base = arguments.base.clone().map_or_else(|| base_of_run(checkpoint), |base| Ok(Some(base)))?;
    let written = model.export_adapter(checkpoint, &adapter.lora, base.as_deref(), &arguments.to);
    let limit = written.map_err(Failure::input)?;
    let (step, to) = (checkpoint.step(), arguments.to.display());
    say(&format!(
        "wrote the adapters of step {step} to {to}, for PEFT and `adapter.path`; --merge writes the whole model"
    ));
    match limit {
        Some(limit @ PeftLimit::Dora { .. }) => say(&format!(
            "warning: {limit}; `adapter.path` reads them, and --merge writes a model that has them"
        )),
        Some(limit @ PeftLimit::Dropout { .. }) => {
            say(&format!("{limit}; to train on with it here, set `adapter.dropout`"));
        }
        None => {}
    }
    Ok(())
}
