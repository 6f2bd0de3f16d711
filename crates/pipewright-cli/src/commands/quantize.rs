//! `pipewright quantize`: writes a model with quantised weights.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright_models::{ModelConfig, hf};
use pipewright_planning::failure::Failure;
use pipewright_planning::screen::say;
use pipewright_schedule::bytes::bytes_text;
use pipewright_schedule::words::counted;

/// The arguments of `pipewright quantize`.
#[derive(Debug, Args)]
pub(crate) struct QuantizeArguments {
    /// The folder of the model
    #[arg(value_name = "DIR")]
    from: PathBuf,
    /// The folder to write; it must be empty or not exist
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// The form of the weights
    #[arg(long = "to", value_enum, value_name = "FORM")]
    form: WeightForm,
}

/// The forms of quantised weights that are written.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum WeightForm {
    /// Four bits of bitsandbytes, with double quantisation
    Nf4,
}

/// Runs the command.
pub(crate) fn run(arguments: &QuantizeArguments) -> Result<(), Failure> {
    let QuantizeArguments { from, to, form: WeightForm::Nf4 } = arguments;
    let model = ModelConfig::read(from).map_err(Failure::input)?;
    let quantised = hf::quantise(from, &*model, to).map_err(Failure::input)?;
    say(&format!(
        "wrote {} of {} as nf4 to {}: {} in place of {}, with a relative error of {:.2}%",
        counted(quantised.matrices, "linear layer"),
        from.display(),
        to.display(),
        bytes_text(quantised.after),
        bytes_text(quantised.before),
        quantised.error * 100.0
    ));
    Ok(())
}
