//! `pipewright partition`: distributes layers over stages.

use std::fmt::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use pipewright_planning::failure::Failure;
use pipewright_planning::output::OutputFile;
use pipewright_run::training::load::load_settings;
use pipewright_run::training::model::read_model;
use pipewright_schedule::partition::{Layout, Method, Partition, partition};
use serde::Serialize;

use crate::schedules::layer_weights::{Sum, Weights};

/// The arguments of `pipewright partition`.
#[derive(Debug, Args)]
pub(crate) struct PartitionArguments {
    /// The weight of each layer, in any unit; decimals such as 1.5 are exact
    #[arg(
        long,
        value_name = "WEIGHT,..",
        value_delimiter = ',',
        required_unless_present_any = ["layout", "config"],
        allow_hyphen_values = true
    )]
    weights: Vec<String>,
    /// A configuration whose model has the layers, instead of --weights
    #[arg(long, value_name = "CONFIG.toml", conflicts_with_all = ["weights", "layout"])]
    config: Option<PathBuf>,
    /// A cut by hand, with a letter for each layer: "E | A*3 | (A M)*2 | A L"; a bar ends a stage, *3 repeats
    #[arg(long, value_name = "LAYOUT", conflicts_with_all = ["stages", "method", "boundaries"])]
    layout: Option<Layout>,
    /// The number of stages
    #[arg(long, value_name = "N", required_unless_present_any = ["boundaries", "layout"])]
    stages: Option<u32>,
    /// The method of distribution
    #[arg(long, value_enum, default_value = "optimal")]
    method: MethodName,
    /// The first layer of each stage except stage 0, for `--method explicit`; its first block, counted from 0
    /// without the embedding, for `--method blocks`
    #[arg(long, value_name = "LAYER,..", value_delimiter = ',', required_if_eq("method", "explicit"))]
    boundaries: Vec<usize>,
    /// The form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    #[command(flatten)]
    output: OutputFile,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MethodName {
    /// The same number of layers for each stage
    Even,
    /// The greedy distribution by weight that PyTorch uses
    Weighted,
    /// The distribution whose heaviest stage is as light as possible
    Optimal,
    /// The distribution that --boundaries gives
    Explicit,
    /// The greedy distribution by the number of parameters: of the layers of --config, or as --weights
    Parameters,
    /// The same number of blocks for each stage: the first of --weights is the embedding, on the first stage, and
    /// the last one the head, on the last stage
    Blocks,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// One line for each stage
    Text,
    /// Inclusive layer ranges and stage weights
    Json,
}

/// The output of `--format json`.
#[derive(Serialize)]
struct Stages {
    stages: Vec<[usize; 2]>,
    weights: Vec<Sum>,
}

/// Runs the command.
pub(crate) fn run(arguments: &PartitionArguments) -> Result<(), Failure> {
    let takes_boundaries = matches!(arguments.method, MethodName::Explicit | MethodName::Blocks);
    if !arguments.boundaries.is_empty() && !takes_boundaries {
        return Err(Failure::input(
            "--boundaries are given without --method explicit or blocks; leave one out or add the other",
        ));
    }
    if let Some(layout) = &arguments.layout {
        return run_layout(arguments, layout);
    }
    // Boundaries determine the number of stages. A count that does not fit the type exceeds every number of
    // layers.
    let implied = u32::try_from(arguments.boundaries.len() + 1).unwrap_or(u32::MAX);
    let (weights, blocks) = match &arguments.config {
        Some(config) => weights_of(config, arguments.method)?,
        None => {
            let weights = Weights::parse(&arguments.weights)?;
            let last = weights.scaled.len().saturating_sub(1);
            (weights, 1..last.max(1))
        }
    };
    let boundaries = arguments.boundaries.clone();
    let method = match arguments.method {
        MethodName::Even => Method::Even,
        MethodName::Weighted | MethodName::Parameters => Method::Weighted,
        MethodName::Optimal => Method::Optimal,
        MethodName::Explicit => Method::Explicit { boundaries },
        MethodName::Blocks => Method::Blocks { blocks, boundaries },
    };
    let cut =
        partition(&weights.scaled, arguments.stages.unwrap_or(implied), &method).map_err(Failure::input)?;
    write_stages(arguments, &stages(&cut, &weights))
}

/// Returns the weights of the layers of a configuration's model, or their numbers of parameters, and which layers
/// are blocks.
fn weights_of(config: &Path, method: MethodName) -> Result<(Weights, Range<usize>), Failure> {
    let settings = load_settings(Some(config), &[])?.settings;
    let layers = read_model(&settings)?.describe(settings.data.seq_len as usize);
    let numbers = match method {
        MethodName::Parameters => layers.layers.iter().map(|layer| layer.parameters).collect(),
        _ => layers.weights(),
    };
    let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
    Ok((Weights::parse(&numbers)?, layers.blocks()))
}

fn write_stages(arguments: &PartitionArguments, stages: &Stages) -> Result<(), Failure> {
    let text = match arguments.format {
        Format::Text => text(stages),
        Format::Json => serde_json::to_string(stages).expect("numbers can be written as JSON") + "\n",
    };
    arguments.output.write(&text)
}

/// Prints the stages of a layout. Without weights, every layer has the weight 1.
fn run_layout(arguments: &PartitionArguments, layout: &Layout) -> Result<(), Failure> {
    let layers = layout.kinds.len();
    let weights = match arguments.weights.as_slice() {
        [] => vec!["1".to_owned(); layers],
        weights if weights.len() == layers => weights.to_vec(),
        weights => {
            return Err(Failure::input(format!(
                "--weights has {} entries and --layout has {layers} layers; give one weight for each layer",
                weights.len()
            )));
        }
    };
    let weights = Weights::parse(&weights)?;
    let method = Method::Explicit { boundaries: layout.boundaries.clone() };
    let cut =
        partition(&weights.scaled, layout.boundaries.len() as u32 + 1, &method).map_err(Failure::input)?;
    write_stages(arguments, &stages(&cut, &weights))
}

fn stages(cut: &Partition, weights: &Weights) -> Stages {
    // Every stage has at least one layer, so its range has an end.
    let stages = cut.ranges().map(|layers| [layers.start, layers.end - 1]).collect();
    let sums = cut.weights(&weights.scaled).into_iter().map(|sum| weights.sum(sum));
    Stages { stages, weights: sums.collect() }
}

fn text(stages: &Stages) -> String {
    let mut text = String::new();
    for (stage, ([first, last], weight)) in stages.stages.iter().zip(&stages.weights).enumerate() {
        writeln!(text, "stage {stage}: layers {first} to {last}, weight {weight}")
            .expect("a string takes all text");
    }
    text
}
