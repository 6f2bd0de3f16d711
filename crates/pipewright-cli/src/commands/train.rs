//! `pipewright train`: prepares a run and trains it from the first step.

use crate::display;
use crate::failure::Failure;
use crate::planning::auto::{self, Chosen};
use crate::run_folder::{self, RunFolder};
use crate::signal::Interrupt;
use crate::training::arguments::{RunArguments, load_settings};
use crate::training::evaluations::Evaluations;
use crate::training::identity::describe;
use crate::training::launch::{abandon, launch};
use crate::training::origin;
use crate::training::overview::overview;
use crate::training::prepare::{identity, prepare, shared_settings};
use crate::training::process_group::ProcessGroup;
use crate::training::shared_folder;
use crate::training::training_loop::TrainingLoop;

/// Runs the command.
pub(crate) fn run(arguments: &RunArguments) -> Result<(), Failure> {
    let mut processes = ProcessGroup::gather()?;
    let outcome = run_with(arguments, &mut processes);
    processes.settle(outcome)
}

fn run_with(arguments: &RunArguments, processes: &mut ProcessGroup) -> Result<(), Failure> {
    let loaded = load_settings(arguments.config.as_deref(), &arguments.set);
    let chosen = match loaded {
        Ok(loaded) if loaded.is_auto() => {
            let loaded = processes.agree(Ok(loaded), |loaded| shared_settings(&loaded.settings))?;
            processes.set_deadline(loaded.settings.run.deadline());
            Ok(auto::choose(loaded, processes)?)
        }
        loaded => loaded.map(Chosen::named),
    };
    let prepared = chosen.and_then(|Chosen { loaded, sentences, files }| {
        if processes.is_leader() {
            sentences.iter().chain(&loaded.notes).for_each(|sentence| display::say(sentence));
        }
        let prepared = prepare(loaded)?;
        processes.set_deadline(prepared.settings.run.deadline());
        if processes.is_leader() {
            prepared.notes.iter().for_each(|note| display::say(note));
            run_folder::probe(&prepared.settings.run.out, &files).map_err(Failure::input)?;
        }
        let description = describe(&prepared);
        Ok((prepared, description, files))
    });
    let (prepared, description, files) =
        processes.agree(prepared, |(prepared, description, _)| identity(prepared, description))?;
    shared_folder::require(processes, &prepared.settings.run.out)?;
    let (settings, overview) = (prepared.settings.clone(), overview(&prepared));
    let evaluations = Evaluations::new(&prepared, None);
    let interrupt = Interrupt::default();
    // The folder is created last, so that a run that cannot start does not move an earlier run.
    let mut trainer = launch(prepared, processes, &interrupt)?;
    let mut folder = None;
    if processes.is_leader() {
        let created = RunFolder::create(&settings.run.out, &settings.to_toml(), &files);
        let created = created.map_err(|error| abandon(&mut trainer, Failure::input(error)))?;
        for sentence in created.moved() {
            display::say(sentence);
        }
        origin::keep(&settings).map_err(|failure| abandon(&mut trainer, failure))?;
        folder = Some(created);
    }
    TrainingLoop {
        settings: &settings,
        overview,
        description,
        evaluations,
        folder,
        processes,
        interrupt: &interrupt,
    }
    .run(trainer)
}
