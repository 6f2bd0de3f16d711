//! `pipewright vpp`: prints the tables of an interleaved pipeline.

use std::fmt::Write;

use clap::{Args, ValueEnum};
use pipewright_schedule::vpp::{VirtualPipeline, VppTables, tables};
use pipewright_schedule::words::counted;

use crate::failure::Failure;
use crate::output::OutputFile;

/// The arguments of `pipewright vpp`.
#[derive(Debug, Args)]
pub struct VppArguments {
    /// The number of ranks in the pipeline
    #[arg(long, value_name = "P")]
    ranks: u32,
    /// The number of stages on each rank
    #[arg(long, value_name = "V")]
    chunks: u32,
    /// The number of microbatches in a step
    #[arg(long, value_name = "M")]
    microbatches: u32,
    /// The number of microbatches that a chunk runs before the next chunk; by default, the number of ranks
    #[arg(long, alias = "group", value_name = "G")]
    group_size: Option<u32>,
    /// The form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    #[command(flatten)]
    output: OutputFile,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// Lines of text
    Text,
    /// All tables as JSON
    Json,
}

/// Runs the command.
pub(crate) fn run(arguments: &VppArguments) -> Result<(), Failure> {
    let &VppArguments { ranks, chunks, microbatches, group_size, .. } = arguments;
    let tables =
        tables(&VirtualPipeline { ranks, chunks, microbatches, group_size }).map_err(Failure::input)?;
    arguments.output.write(&match arguments.format {
        Format::Text => text(&tables),
        Format::Json => serde_json::to_string(&tables).expect("numbers can be written as JSON") + "\n",
    })
}

fn text(tables: &VppTables) -> String {
    let mut text = String::new();
    for (rank, (stages, warmup)) in tables.stage_ids.iter().zip(&tables.warmup).enumerate() {
        let stages: Vec<String> = stages.iter().map(u32::to_string).collect();
        let (stages, &(before, after, _)) = (stages.join(", "), warmup);
        writeln!(
            text,
            "rank {rank}: stages {stages}; {} before the first backward, {after} after it",
            counted(before, "forward")
        )
        .expect("a string takes all text");
    }
    let order: Vec<String> =
        tables.table.iter().map(|(microbatch, chunk)| format!("{microbatch}/{chunk}")).collect();
    text + "microbatch/chunk in order: " + &order.join(" ") + "\n"
}
