//! `pipewright resume`: goes on with a run from its newest checkpoint, under its own settings or changed ones.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use pipewright::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder};
use pipewright::transport::Fields;
use serde_json::{Map, Value};

use crate::commands::crew::Crew;
use crate::commands::identity::{describe, require_same};
use crate::commands::launch::{abandon, launch, launch_from};
use crate::commands::overview::overview;
use crate::commands::prepare::{Prepared, identity, load_settings, prepare_settings};
use crate::commands::steps::Steps;
use crate::display;
use crate::failure::Failure;
use crate::run_folder::{self, RunFolder};
use crate::signal::Interrupt;

/// The arguments of `pipewright resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArguments {
    /// The folder of the run
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    /// Override a key of the run's configuration
    #[arg(long, value_name = "section.key=value")]
    set: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(arguments: &ResumeArguments) -> Result<(), Failure> {
    let mut crew = Crew::gather()?;
    let outcome = run_with(arguments, &mut crew);
    crew.settle(outcome)
}

fn run_with(arguments: &ResumeArguments, crew: &mut Crew) -> Result<(), Failure> {
    // Whoever owns the folder puts it in order, before the others look at it.
    let owned = own(arguments, crew.speaks());
    let owned = crew.agree(owned, |_| Fields::new())?;
    let found = Found::find(arguments, owned).inspect(|found| {
        crew.set_deadline(found.prepared.settings.run.deadline());
    });
    let Found { prepared, description, checkpoint, owned } = crew.agree(found, Found::identity)?;
    let (settings, overview) = (prepared.settings.clone(), overview(&prepared));
    let done = checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step());
    if crew.speaks() {
        display::say(&match &checkpoint {
            Some(checkpoint) => format!("going on from step {done}, {}", checkpoint.path().display()),
            None => "the run has no checkpoint: starting again from step 1, with the same seed".to_owned(),
        });
    }
    let interrupt = Interrupt::default();
    let mut trainer = match &checkpoint {
        Some(checkpoint) => launch_from(prepared, checkpoint, crew, &interrupt)?,
        None => launch(prepared, crew, &interrupt)?,
    };
    let reopened = owned.map(|owned| RunFolder::reopen(&settings.run.out, &settings.to_toml(), done, owned));
    let folder = reopened.transpose();
    let folder = folder.map_err(|error| abandon(&mut trainer, Failure::input(error)))?;
    Steps { settings: &settings, overview, description, folder, crew, interrupt: &interrupt }.take(trainer)
}

/// The absolute folder of the run.
fn out(ResumeArguments { run, .. }: &ResumeArguments) -> Result<PathBuf, Failure> {
    std::path::absolute(run).map_err(|error| {
        Failure::input(format!("{}: no path: {error}; name the run's folder", run.display()))
    })
}

/// Makes the run's folder this process's own, if it is the one that writes: from here on nobody else trains in it.
fn own(arguments: &ResumeArguments, owns: bool) -> Result<Option<CheckpointFolder>, Failure> {
    let out = out(arguments)?;
    run_folder::config_of(&out).map_err(Failure::input)?;
    owns.then(|| run_folder::own_checkpoints(&out)).transpose().map_err(Failure::input)
}

/// A run to go on with.
struct Found {
    prepared: Prepared,
    description: Map<String, Value>,
    checkpoint: Option<Arc<Checkpoint>>,
    /// In the process that writes the run's folder.
    owned: Option<CheckpointFolder>,
}

impl Found {
    fn find(arguments: &ResumeArguments, owned: Option<CheckpointFolder>) -> Result<Self, Failure> {
        let set = &arguments.set;
        let out = out(arguments)?;
        let config = run_folder::config_of(&out).map_err(Failure::input)?;
        let mut settings = load_settings(Some(&config), set)?;
        if set.iter().any(|argument| argument.starts_with("run.out")) && settings.run.out != out {
            let place = out.display();
            return Err(Failure::input(format!(
                "a run goes on in its own folder, {place}; leave out run.out"
            )));
        }
        // The run may have been moved since it wrote its configuration.
        settings.run.out = out;
        let checkpoint = newest(&run_folder::checkpoints_of(&settings.run.out))?;
        let prepared = prepare_settings(settings)?;
        let description = describe(&prepared);
        if let Some(checkpoint) = &checkpoint {
            require_same(&description, checkpoint)?;
            require_steps_left(&prepared, checkpoint)?;
        }
        Ok(Self { prepared, description, checkpoint, owned })
    }

    /// What must not differ between processes.
    fn identity(&self) -> Fields {
        let mut fields = identity(&self.prepared, &self.description);
        let shards = self.checkpoint.iter().flat_map(|checkpoint| &checkpoint.manifest().shards);
        let hashes: Vec<&str> = shards.map(|shard| shard.hash.as_str()).collect();
        fields.insert("checkpoint".to_owned(), hashes.join(" "));
        fields
    }
}

fn newest(folder: &Path) -> Result<Option<Arc<Checkpoint>>, Failure> {
    match CheckpointFolder::newest(folder) {
        Ok(checkpoint) => Ok(Some(Arc::new(checkpoint))),
        Err(CheckpointError::NoneComplete { .. }) => Ok(None),
        Err(error) => Err(Failure::input(error)),
    }
}

fn require_steps_left(prepared: &Prepared, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let (done, steps) = (checkpoint.step(), prepared.settings.run.steps);
    if done <= steps {
        return Ok(());
    }
    let place = checkpoint.path().display();
    Err(Failure::input(format!(
        "{place}: the checkpoint has {done} steps behind it, more than run.steps = {steps}; ask for more steps"
    )))
}
