//! `pipewright clusters`: lists the machines that plans know by name, or shows one as a cluster file.

use clap::{Args, ValueEnum};
use pipewright_cluster::catalogue::machines;
use pipewright_cluster::cluster_file::to_toml;

use crate::clusters::{list, machine};
use crate::failure::Failure;
use crate::output::OutputFile;

/// The arguments of `pipewright clusters`.
#[derive(Debug, Args)]
pub struct ClustersArguments {
    /// The name of a machine, or a cluster file: shows all its figures as a cluster file
    #[arg(value_name = "NAME|FILE.toml")]
    name: Option<String>,
    /// The form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    #[command(flatten)]
    output: OutputFile,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// A table; for one machine, a cluster file
    Text,
    /// All figures with their sources
    Json,
}

/// Runs the command.
pub(crate) fn run(arguments: &ClustersArguments) -> Result<(), Failure> {
    let text = match (&arguments.name, arguments.format) {
        (None, Format::Text) => list::text(machines()),
        (None, Format::Json) => list::json(machines()),
        (Some(name), Format::Text) => to_toml(&machine::machine(name)?),
        (Some(name), Format::Json) => list::json(&[machine::machine(name)?]),
    };
    arguments.output.write(&text)
}
