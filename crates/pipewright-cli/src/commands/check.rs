//! `pipewright check`: checks everything that can be checked without training, and prints a summary of the
//! run.

mod summary;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use pipewright_document::text::escape_in_json;
use pipewright_models::CutModel;
use pipewright_planning::failure::Failure;
use pipewright_planning::output::{show, write};
use pipewright_planning::screen::say;
use pipewright_run::run_folder;
use pipewright_run::settings::Settings;
use pipewright_run::settings::profile::read_ranks;
use pipewright_run::training::memory::{memory_plan, move_plan, require_fit};
use pipewright_run::training::model::{described, read_model};
use pipewright_run::training::prepare::prepare;
use pipewright_run::training::rank_needs::stated_memory;
use pipewright_run::training::reference::check_file;
use pipewright_run::training::state_copies::require_space;
use summary::Summary;

use crate::commands::run_arguments::RunArguments;
use crate::planning::auto::choose_without_profile;
use crate::planning::decision::Chosen;
use crate::planning::measure::{profiled_run, workload};

/// The arguments of `pipewright check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    #[command(flatten)]
    run: RunArguments,
    /// Compare each rank with its memory in a profile of unlike ranks, such as the one of the plan
    #[arg(long, value_name = "PROFILE.toml")]
    profile: Option<PathBuf>,
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
    check_file(&prepared)?;
    run_folder::probe(&prepared.settings.run.out, &chosen.files).map_err(Failure::input)?;
    let stages = prepared.outlines()?;
    let (stated, read_rate) = match &arguments.profile {
        Some(file) => stated_in(file, &prepared.settings, &model)?,
        None => (Vec::new(), None),
    };
    let memory = memory_plan(prepared.parts(), &model, &stages)?.with_stated(stated.clone());
    let memory = memory.with_read_rate(read_rate);
    let moves = prepared
        .moves_layers()
        .then(|| move_plan(prepared.parts(), &model, &stages, None).with_stated(stated));
    let summary = Summary {
        prepared: &prepared,
        model: &model,
        stages: &stages,
        memory: &memory,
        moves: moves.as_ref(),
        planned: &chosen.sentences,
    };
    match arguments.format {
        Format::Text => show(&summary.text())?,
        Format::Json => write(None, &escape_in_json(&format!("{}\n", summary.json())))?,
    }
    require_fit(&memory)?;
    require_space(&prepared)
}

/// Returns the memory of each rank that a profile states, and the rate at which the files of a base are read.
fn stated_in(
    file: &Path,
    settings: &Settings,
    model: &CutModel,
) -> Result<(Vec<Option<u64>>, Option<f64>), Failure> {
    let layers = described(settings, model);
    let profile = read_ranks(file, &profiled_run(settings, workload(settings, &layers)))?;
    let ranks = settings.mesh.ranks(settings.pipeline.ranks);
    if let Some(problem) = profile.problems_for(ranks).first() {
        return Err(Failure::input(format!(
            "{}: {problem}; if the run has only some of the profile's ranks, name them in pipeline.profile_ranks",
            file.display()
        )));
    }
    Ok((stated_memory(&profile, ranks), profile.link.read_bytes_per_s))
}
