//! `pipewright export`: writes a checkpoint's model as a Hugging Face directory or a GGUF file, or its adapters as a PEFT
//! directory or a GGUF file.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright::checkpoint::Checkpoint;
use pipewright_models::hf::{ExportOptions, GgufForm, PeftLimit, WeightType};
use pipewright_models::{AdaptedCheckpoint, ModelConfig, ModelSource, hf};
use pipewright_planning::failure::Failure;
use pipewright_planning::screen::say;
use pipewright_run::training::run_adapter::StoredAdapter;
use pipewright_run::training::trained_model::{base_of_run, model_of};
use pipewright_run::training::{checkpoint_path, origin};

use crate::commands::quantize::gguf_notes;

/// The arguments of `pipewright export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// A run's folder, for its newest checkpoint, or a checkpoint's folder
    #[arg(value_name = "CHECKPOINT_OR_RUN")]
    from: PathBuf,
    /// The folder to write, which must be empty or not exist; with --format gguf also a file that ends in .gguf
    #[arg(value_name = "DIR")]
    to: PathBuf,
    /// The files that are written
    #[arg(long, value_enum, default_value_t = FileFormat::Hf)]
    format: FileFormat,
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

/// The files of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FileFormat {
    /// A Hugging Face or PEFT directory
    Hf,
    /// One file for llama.cpp
    Gguf,
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
    /// Eight bits in blocks of 32 (GGUF)
    #[value(name = "q8_0")]
    Q8_0,
    /// Four bits in blocks of 256 (GGUF)
    #[value(name = "q4_k")]
    Q4K,
}

impl From<ElementType> for GgufForm {
    fn from(kind: ElementType) -> Self {
        match kind {
            ElementType::Float32 => Self::Plain(WeightType::Float32),
            ElementType::Bfloat16 => Self::Plain(WeightType::Bfloat16),
            ElementType::Float16 => Self::Plain(WeightType::Float16),
            ElementType::Q8_0 => Self::Q8_0,
            ElementType::Q4K => Self::Q4K,
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
    let base =
        adapter.as_ref().map(|adapter| adapter.base(arguments.base.as_deref(), base_of_run(&checkpoint)?));
    let base = base.transpose()?;
    let adapted = adapter.as_ref().zip(base.as_deref()).map(|(adapter, base)| AdaptedCheckpoint {
        checkpoint: &checkpoint,
        lora: &adapter.lora,
        base,
    });
    let form = arguments.dtype.map(GgufForm::from);
    if arguments.format == FileFormat::Gguf {
        let source = adapted.map_or(ModelSource::Checkpoint(&checkpoint), ModelSource::Adapted);
        let written =
            model.export_gguf(source, origin.as_deref(), form, &arguments.to).map_err(Failure::input)?;
        warning.iter().for_each(|warning| say(warning));
        let (name, path) = (written.form.name(), written.path.display());
        say(&format!("wrote the model of step {step} as GGUF in {name} to {path}"));
        gguf_notes(&written).iter().for_each(|note| say(note));
        return Ok(());
    }
    let weight_type = match form {
        None => None,
        Some(GgufForm::Plain(kind)) => Some(kind),
        Some(form) => {
            let name = form.name();
            return Err(Failure::input(format!("--dtype {name} is a form of GGUF: add --format gguf")));
        }
    };
    let options = ExportOptions { origin: origin.as_deref(), weight_type };
    let kind = match adapted {
        Some(adapted) => model.export_merged(adapted, &options, &arguments.to),
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
    if arguments.format == FileFormat::Gguf {
        let path =
            model.export_gguf_adapter(checkpoint, &adapter.lora, &arguments.to).map_err(Failure::input)?;
        let (step, path) = (checkpoint.step(), path.display());
        say(&format!("wrote the adapters of step {step} as GGUF to {path}; --merge writes the whole model"));
        return Ok(());
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
