//! `pipewright train`: prepares a run and trains from its first step.

use crate::arguments::RunArguments;
use crate::commands::crew::Crew;
use crate::commands::identity::describe;
use crate::commands::launch::{abandon, launch};
use crate::commands::origin;
use crate::commands::overview::overview;
use crate::commands::prepare::{identity, prepare};
use crate::commands::steps::Steps;
use crate::display;
use crate::failure::Failure;
use crate::run_folder::{self, RunFolder};
use crate::signal::Interrupt;

/// Runs the command.
pub(crate) fn run(arguments: &RunArguments) -> Result<(), Failure> {
    let mut crew = Crew::gather()?;
    let outcome = run_with(arguments, &mut crew);
    crew.settle(outcome)
}

fn run_with(arguments: &RunArguments, crew: &mut Crew) -> Result<(), Failure> {
    let prepared = prepare(arguments).and_then(|prepared| {
        crew.set_deadline(prepared.settings.run.deadline());
        if crew.speaks() {
            run_folder::probe(&prepared.settings.run.out).map_err(Failure::input)?;
        }
        let description = describe(&prepared);
        Ok((prepared, description))
    });
    let (prepared, description) =
        crew.agree(prepared, |(prepared, description)| identity(prepared, description))?;
    let (settings, overview) = (prepared.settings.clone(), overview(&prepared));
    let interrupt = Interrupt::default();
    // The folder comes last: a run that cannot start leaves the one before it where it is.
    let mut trainer = launch(prepared, crew, &interrupt)?;
    let mut folder = None;
    if crew.speaks() {
        let created = RunFolder::create(&settings.run.out, &settings.to_toml());
        let created = created.map_err(|error| abandon(&mut trainer, Failure::input(error)))?;
        if let Some(aside) = created.moved_aside() {
            display::say(&format!("moved the earlier run to {}", aside.display()));
        }
        origin::keep(&settings).map_err(|failure| abandon(&mut trainer, failure))?;
        folder = Some(created);
    }
    Steps { settings: &settings, overview, description, folder, crew, interrupt: &interrupt }.take(trainer)
}
