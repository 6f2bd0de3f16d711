//! `pipewright inspect`: verifies a checkpoint, and shows its contents and the losses of the run up to it.
//!
//! The check fails if parameters have elements that are not finite, because the model is ruined.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use pipewright::checkpoint::{Checkpoint, NotFinite};
use pipewright_planning::failure::{Exit, Failure};
use pipewright_planning::output;
use pipewright_run::run_folder::losses;
use pipewright_run::training::checkpoint_path::{self, not_finite};
use serde_json::{Value, json};

/// The arguments of `pipewright inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// A run's folder, for its newest checkpoint, or a checkpoint's folder
    #[arg(value_name = "DIR")]
    path: PathBuf,
    /// The format of the output
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// Runs the command.
pub(crate) fn run(arguments: &InspectArguments) -> Result<(), Failure> {
    let checkpoint = checkpoint_path::open(&arguments.path)?;
    let losses = losses_to(&checkpoint);
    match arguments.format {
        Format::Text => output::show(&text(&checkpoint, &losses))?,
        Format::Json => output::write(None, &format!("{:#}\n", json(&checkpoint, &losses)))?,
    }
    // The content comes first: it helps to find the cause.
    not_finite(&checkpoint).map_or(Ok(()), |flaws| Err(Failure::new(Exit::CheckFailed, flaws)))
}

/// Returns the losses of all steps up to the checkpoint's, if the checkpoint is in the folder of its run.
fn losses_to(checkpoint: &Checkpoint) -> Vec<f64> {
    let run = checkpoint.path().parent().and_then(Path::parent).unwrap_or(Path::new(""));
    losses(run, checkpoint.step())
}

fn text(checkpoint: &Checkpoint, losses: &[f64]) -> String {
    let manifest = checkpoint.manifest();
    let mut text = String::new();
    let mut line = |what: &str, words: String| {
        writeln!(text, "{what:11} {words}").expect("a string takes all text");
    };
    line("checkpoint", checkpoint.path().display().to_string());
    line("step", manifest.step.to_string());
    if let [first, .., last] | [first @ last] = losses {
        line("loss", format!("{first:.4} at the first step, {last:.4} at the last"));
    }
    line("data", format!("epoch {}, row {} comes next", manifest.cursor.epoch, manifest.cursor.index));
    for file in &manifest.files {
        line("file", format!("{}  {} bytes  {}  verified", file.name, file.bytes, &file.hash));
    }
    let elements: usize = checkpoint.parameters().map(|found| found.shape.iter().product::<usize>()).sum();
    line("parameters", format!("{elements} in {} tensors", checkpoint.parameters().count()));
    let flaws: BTreeMap<&str, NotFinite> = checkpoint.not_finite().collect();
    for parameter in checkpoint.parameters() {
        let flaw = flaws.get(parameter.path).map(|flaw| format!("  has {flaw}")).unwrap_or_default();
        line("", format!("{:?} {:?}  {}{flaw}", parameter.dtype, parameter.shape, parameter.path));
    }
    text
}

fn json(checkpoint: &Checkpoint, losses: &[f64]) -> Value {
    let manifest = checkpoint.manifest();
    let parameters = checkpoint.parameters().map(|parameter| {
        let dtype = format!("{:?}", parameter.dtype);
        json!({"path": parameter.path, "shape": parameter.shape, "dtype": dtype})
    });
    let flaws = checkpoint
        .not_finite()
        .map(|(path, flaw)| json!({"path": path, "nan": flaw.nan, "infinite": flaw.infinite}));
    json!({
        "checkpoint": checkpoint.path(),
        "step": manifest.step,
        "cursor": manifest.cursor,
        "description": manifest.description,
        "losses": losses,
        "shards": manifest.files,
        "parameters": parameters.collect::<Vec<_>>(),
        "not_finite": flaws.collect::<Vec<_>>(),
        // Opening the checkpoint compared all bytes with their hashes; a damaged checkpoint ends the command
        // with an error.
        "verified": true,
    })
}
