//! `pipewright quantize`: writes a model with quantised weights.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright_models::hf::{GgufForm, GgufWritten};
use pipewright_models::{ModelConfig, hf};
use pipewright_planning::failure::Failure;
use pipewright_planning::screen::say;
use pipewright_schedule::bytes::bytes_text;
use pipewright_schedule::words::counted;

/// The arguments of `pipewright quantize`.
#[derive(Debug, Args)]
pub(crate) struct QuantizeArguments {
    /// The folder of the model, or its GGUF file
    #[arg(value_name = "DIR")]
    from: PathBuf,
    /// The folder to write, which must be empty or not exist. GGUF forms write OUT/model.gguf, or OUT if it ends in .gguf
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
    /// GGUF: eight bits in blocks of 32
    #[value(name = "q8_0")]
    Q8_0,
    /// GGUF: four bits in blocks of 256, the embedding and the head in six
    #[value(name = "q4_k")]
    Q4K,
}

/// Returns the sentences about a GGUF file.
pub(crate) fn gguf_notes(written: &GgufWritten) -> Vec<String> {
    let others = (written.others > 0).then(|| {
        format!(
            "{} in q8_0 or f16, because their rows are not whole blocks of {}",
            counted(written.others, "tensor"),
            written.form.name()
        )
    });
    let tokenizer =
        (!written.has_tokenizer).then(|| "without a tokenizer: the model has no tokenizer".to_owned());
    others.into_iter().chain(tokenizer).collect()
}

/// Runs the command.
pub(crate) fn run(arguments: &QuantizeArguments) -> Result<(), Failure> {
    let QuantizeArguments { from, to, form } = arguments;
    let model = ModelConfig::read(from).map_err(Failure::input)?;
    let gguf = match form {
        WeightForm::Nf4 => None,
        WeightForm::Q8_0 => Some(GgufForm::Q8_0),
        WeightForm::Q4K => Some(GgufForm::Q4K),
    };
    let (quantised, name, path, written) = match gguf {
        None => (hf::quantise(from, &*model, to).map_err(Failure::input)?, "nf4", to.clone(), None),
        Some(form) => {
            let written = hf::quantise_gguf(from, &*model, form, to).map_err(Failure::input)?;
            (written.quantised, form.name(), written.path.clone(), Some(written))
        }
    };
    say(&format!(
        "wrote {} of {} as {name} to {}: {} in place of {}, with a relative error of {:.2}%",
        counted(quantised.matrices, if gguf.is_some() { "tensor" } else { "linear layer" }),
        from.display(),
        path.display(),
        bytes_text(quantised.after),
        bytes_text(quantised.before),
        quantised.error * 100.0
    ));
    written.iter().flat_map(gguf_notes).for_each(|note| say(&note));
    Ok(())
}
