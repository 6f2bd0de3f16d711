//! `pipewright check`: checks everything that can be checked without training, and prints a summary of the
//! run.

mod summary;

use std::sync::Arc;

use clap::{Args, ValueEnum};
use pipewright_document::text::escape_in_json;
use pipewright_planning::failure::Failure;
use pipewright_planning::output::{show, write};
use pipewright_planning::screen::say;
use pipewright_run::run_folder;
use pipewright_run::training::memory::{memory_plan, require_fit};
use pipewright_run::training::model::read_model;
use pipewright_run::training::prepare::prepare;
use pipewright_run::training::state_copies::require_space;
use summary::Summary;

use crate::commands::run_arguments::RunArguments;
use crate::planning::auto::choose_without_profile;
use crate::planning::decision::Chosen;

/// The arguments of `pipewright check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    #[command(flatten)]
    run: RunArguments,
    /// The form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// A summary for people
    Text,
    /// The same as JSON, sizes in bytes
    Json,
}

/// Runs the command.
pub(crate) fn run(arguments: &CheckArguments) -> Result<(), Failure> {
    let loaded = arguments.run.load()?;
    loaded.notes.iter().for_each(|note| say(note));
    let model = read_model(&loaded.settings)?;
    let chosen = match loaded.scheduled() {
        Ok(scheduled) => Chosen::named(scheduled, model),
        Err(settings) => choose_without_profile(*settings, &model)?,
    };
    let model = Arc::new(chosen.model);
    let prepared = prepare(chosen.scheduled, model.clone())?;
    prepared.notes.iter().for_each(|note| say(note));
    run_folder::probe(&prepared.settings.run.out, &chosen.files).map_err(Failure::input)?;
    let stages = prepared.outlines()?;
    let memory = memory_plan(prepared.parts(), &model, &stages)?;
    let summary = Summary {
        prepared: &prepared,
        model: &model,
        stages: &stages,
        memory: &memory,
        planned: &chosen.sentences,
    };
    match arguments.format {
        Format::Text => show(&summary.text())?,
        Format::Json => write(None, &escape_in_json(&format!("{}\n", summary.json())))?,
    }
    require_fit(&memory)?;
    require_space(&prepared)
}
