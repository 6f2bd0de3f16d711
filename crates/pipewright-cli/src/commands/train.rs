//! `pipewright train`: prepares a run and trains it from the first step.

use pipewright_models::CutModel;

use crate::commands::resume;
use crate::display;
use crate::failure::Failure;
use crate::planning::auto;
use crate::planning::decision::Chosen;
use crate::recovery::Attempts;
use crate::run_folder::{self, RunFolder};
use crate::training::arguments::RunArguments;
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::copies_link::{link_of, remove_copies};
use crate::training::efficiency::Efficiency;
use crate::training::evaluations::Evaluations;
use crate::training::identity::{describe, identity, shared_settings};
use crate::training::launch::{abandon, launch};
use crate::training::model::read_model;
use crate::training::origin;
use crate::training::overview::overview;
use crate::training::prepare::prepare;
use crate::training::process_group::ProcessGroup;
use crate::training::rank_hosts::RankHosts;
use crate::training::shared_folder;
use crate::training::state_copies::{self, StateCopies};
use crate::training::training_loop::TrainingLoop;
use pipewright_run::settings::Loaded;

/// Runs the command.
pub(crate) fn run(arguments: &RunArguments) -> Result<(), Failure> {
    let mut processes = ProcessGroup::gather()?;
    let mut attempts = Attempts::new()?;
    let outcome = run_with(arguments, &mut processes, &mut attempts);
    let outcome = resume::after_faults(outcome, &mut processes, &mut attempts);
    processes.settle(outcome)
}

fn run_with(
    arguments: &RunArguments,
    processes: &mut ProcessGroup,
    attempts: &mut Attempts,
) -> Result<(), Failure> {
    let prepared = choose(arguments, processes)?.and_then(|chosen| {
        let Chosen { scheduled, model, sentences, files } = chosen;
        if processes.is_leader() {
            sentences.iter().for_each(|sentence| display::say(sentence));
        }
        let prepared = prepare(scheduled, model)?;
        processes.set_deadline(prepared.settings.run.deadline());
        state_copies::require_space(&prepared)?;
        if processes.is_leader() {
            prepared.notes.iter().for_each(|note| display::say(note));
            run_folder::probe(&prepared.settings.run.out, &files).map_err(Failure::input)?;
        }
        let (description, overview) = (describe(&prepared)?, overview(&prepared)?);
        Ok((prepared, description, overview, files))
    });
    let (prepared, description, overview, files) =
        processes.agree(prepared, |(prepared, description, ..)| identity(prepared, description))?;
    shared_folder::require(processes, &prepared.settings.run.out)?;
    let settings = prepared.settings.clone();
    let copies = state_copies::place_of(processes, &settings, false, None)?;
    let hosts = RankHosts::find(processes, &settings)?;
    let (efficiency, space) = (Efficiency::of(&prepared), CheckpointSpace::of(prepared.parts()));
    let evaluations = Evaluations::new(&prepared, None);
    // The folder is created last, so that a run that cannot start does not move an earlier run.
    let mut trainer = launch(prepared, processes, attempts)?;
    let mut folder = None;
    if processes.is_leader() {
        let earlier = link_of(&settings.run.out);
        let created = RunFolder::create(&settings.run.out, &settings.to_toml(), &files);
        let created = created.map_err(|error| abandon(&mut trainer, Failure::input(error)))?;
        processes.note_begun();
        for sentence in created.moved() {
            display::say(sentence);
        }
        // The copies of the run that was moved aside. While it existed, it might have run.
        earlier.iter().for_each(|copies| remove_copies(copies));
        origin::keep(&settings).map_err(|failure| abandon(&mut trainer, failure))?;
        folder = Some(created);
    }
    let copies = StateCopies::begin(copies, &settings, 0, folder.is_some());
    let copies = copies.map_err(|failure| abandon(&mut trainer, failure))?;
    attempts.begin(&settings);
    TrainingLoop {
        settings: &settings,
        overview,
        efficiency,
        description,
        evaluations,
        folder,
        space,
        hosts,
        copies,
        saved: 0,
        processes,
        attempts,
    }
    .run(trainer)
}

/// Loads the settings with their schedule, and plans it if they leave the choice to a plan. The inner result
/// belongs to this process, and the processes compare it afterwards. The outer error belongs to all
/// processes, because they compare their settings before they measure.
fn choose(
    arguments: &RunArguments,
    processes: &mut ProcessGroup,
) -> Result<Result<Chosen, Failure>, Failure> {
    let (loaded, model) = match load(arguments, processes.is_leader()) {
        Ok(loaded) => loaded,
        Err(failure) => return Ok(Err(failure)),
    };
    match loaded.scheduled() {
        Ok(scheduled) => Ok(Ok(Chosen::named(scheduled, model))),
        Err(settings) => {
            let settings = processes.agree(Ok(settings), |settings| shared_settings(settings))?;
            processes.set_deadline(settings.run.deadline());
            auto::choose(*settings, &model, processes).map(Ok)
        }
    }
}

fn load(arguments: &RunArguments, is_leader: bool) -> Result<(Loaded, CutModel), Failure> {
    let loaded = arguments.load()?;
    let model = read_model(&loaded.settings)?;
    if is_leader {
        loaded.notes.iter().for_each(|note| display::say(note));
    }
    Ok((loaded, model))
}
