//! Predicts the steps of published training runs on clusters, compares them with what was measured, and names the
//! plans that the search would have chosen instead.
//!
//! The predictions come from data sheets and shapes, so this bench measures nothing on the machine at hand.

use std::path::{Path, PathBuf};

use pipewright_cluster::published;
use pipewright_schedule::error_text::with_causes;
use pipewright_system::bounded_file;

use crate::harness::Outcome;

#[path = "../../crates/pipewright-cluster/tests/cluster/comparison.rs"]
mod comparison;

/// The file and the form of the output.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Machines, models and runs; without a file, the runs that the repository has.
    file: Option<PathBuf>,
    /// A table in Markdown, or JSON.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Format {
    Table,
    Json,
}

/// The runs that the repository has.
const RUNS: &str = include_str!("../../crates/pipewright-cluster/tests/cluster/runs.toml");

pub(crate) fn run(options: &Options) -> Outcome {
    let text = options.file.as_deref().map_or_else(|| Ok(RUNS.to_owned()), read)?;
    let published = published::read(&text).map_err(|error| with_causes(&error))?;
    let comparison = comparison::compare_with_plans(&published)?;
    match options.format {
        Format::Table => print!("{}", comparison.to_markdown()),
        Format::Json => println!("{}", serde_json::to_string_pretty(&comparison)?),
    }
    Ok(())
}

fn read(path: &Path) -> Outcome<String> {
    let text = bounded_file::read_text(path, published::MAX_FILE as u64);
    Ok(text.map_err(|error| format!("{}: {error}", path.display()))?)
}
