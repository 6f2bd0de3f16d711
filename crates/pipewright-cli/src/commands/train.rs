//! `pipewright train`: prepares a run and trains it from the first step.

use crate::commands::auto::{self, Chosen};
use crate::commands::evaluations::Evaluations;
use crate::commands::launch::{abandon, launch};
use crate::commands::origin;
use crate::commands::overview::overview;
use crate::commands::prepare::{identity, prepare, shared_settings};
use crate::commands::process_group::ProcessGroup;
use crate::commands::run_arguments::{RunArguments, load_settings};
use crate::commands::run_identity::describe;
use crate::commands::shared_folder;
use crate::commands::training_loop::TrainingLoop;
use crate::display;
use crate::failure::Failure;
use crate::run_folder::{self, RunFolder};
use crate::signal::Interrupt;

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
