//! `pipewright inspect`: verifies a checkpoint, and shows its contents and the losses of the run up to it.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use pipewright::checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::commands::checkpoint_path;
use crate::failure::Failure;
use crate::output;
use crate::run_folder::{METRICS, lines_to};

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
    let text = match arguments.format {
        Format::Text => text(&checkpoint, &losses),
        Format::Json => format!("{:#}\n", json(&checkpoint, &losses)),
    };
    output::write(None, &text)
}

/// Returns the losses of all steps up to the checkpoint's, if the checkpoint is in the folder of its run.
fn losses_to(checkpoint: &Checkpoint) -> Vec<f64> {
    let run = checkpoint.path().parent().and_then(Path::parent).unwrap_or(Path::new(""));
    let metrics = fs::read_to_string(run.join(METRICS)).unwrap_or_default();
    let lines = &metrics[..lines_to(&metrics, checkpoint.step())];
    let loss = |line: &str| serde_json::from_str::<Value>(line).ok()?.get("loss")?.as_f64();
    lines.lines().filter_map(loss).collect()
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
    for parameter in checkpoint.parameters() {
        line("", format!("{:?} {:?}  {}", parameter.dtype, parameter.shape, parameter.path));
    }
    text
}

fn json(checkpoint: &Checkpoint, losses: &[f64]) -> Value {
    let manifest = checkpoint.manifest();
    let parameters = checkpoint.parameters().map(|parameter| {
        let dtype = format!("{:?}", parameter.dtype);
        json!({"path": parameter.path, "shape": parameter.shape, "dtype": dtype})
    });
    json!({
        "checkpoint": checkpoint.path(),
        "step": manifest.step,
        "cursor": manifest.cursor,
        "description": manifest.description,
        "losses": losses,
        "shards": manifest.files,
        "parameters": parameters.collect::<Vec<_>>(),
        // Opening the checkpoint verified it; a damaged checkpoint ends the command with an error.
        "verified": true,
    })
}
