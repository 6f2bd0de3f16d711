//! `pipewright resume`: resumes a run from its newest checkpoint, or from the checkpoint that a path names.
//! The settings may be changed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder};
use pipewright::transport::Fields;
use serde_json::{Map, Value};

use crate::display;
use crate::failure::Failure;
use crate::fault::{Fault, launched_start};
use crate::recovery::{Attempts, Restart, StateSource};
use crate::run_folder::{self, RunFolder, RunFolderError, RunLock};
use crate::training::arguments::load_settings;
use crate::training::checkpoint_path::{RunPath, not_finite};
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::copies_link::{Origin, has_copies};
use crate::training::copy_search::{self, FoundCopy};
use crate::training::efficiency::Efficiency;
use crate::training::evaluations::Evaluations;
use crate::training::identity::{LOSS, checkpoint_files, describe, identity, require_same};
use crate::training::launch::{abandon, launch, launch_from};
use crate::training::model::read_model;
use crate::training::overview::overview;
use crate::training::prepare::{Prepared, prepare_settings};
use crate::training::process_group::ProcessGroup;
use crate::training::rank_hosts::RankHosts;
use crate::training::rate_change;
use crate::training::resume_arguments::ResumeArguments;
use crate::training::shared_folder;
use crate::training::state_copies::{self, StateCopies};
use crate::training::training_loop::TrainingLoop;
use pipewright_run::settings::{Loaded, Scheduled};
use pipewright_run::text::quoted;

/// Runs the command.
pub(crate) fn run(arguments: &ResumeArguments) -> Result<(), Failure> {
    let mut processes = ProcessGroup::gather()?;
    let mut attempts = Attempts::new()?;
    let outcome = run_with(arguments, &mut processes, &mut attempts);
    let outcome = after_faults(outcome, &mut processes, &mut attempts);
    processes.settle(outcome)
}

/// Resumes a run whose ranks are threads of this process from its newest checkpoint, as long as it fails and
/// may be restarted.
pub(crate) fn after_faults(
    mut outcome: Result<(), Failure>,
    processes: &mut ProcessGroup,
    attempts: &mut Attempts,
) -> Result<(), Failure> {
    while let Err(failure) = outcome {
        let arguments = ResumeArguments { run: attempts.after(failure)?, set: Vec::new() };
        outcome = run_with(&arguments, processes, attempts);
    }
    outcome
}

fn run_with(
    arguments: &ResumeArguments,
    processes: &mut ProcessGroup,
    attempts: &mut Attempts,
) -> Result<(), Failure> {
    // The leader locks the folder and cleans it up before the other processes read it.
    let owned = processes.agree(own(arguments, processes.is_leader()), |_| Fields::new())?;
    shared_folder::require(processes, &RunPath::of(&arguments.run)?.run)?;
    let restart = attempts.take_restart();
    let steps = arguments.load().ok().map(|loaded| loaded.settings.run.steps);
    let began = Instant::now();
    let copy = copy_search::newest(processes, &RunPath::of(&arguments.run)?, steps)?;
    let searched = began.elapsed();
    let found = ResumableRun::find(arguments, (copy, searched), owned, restart).inspect(|found| {
        processes.set_deadline(found.prepared.settings.run.deadline());
    });
    let found = found.and_then(|found| Ok((overview(&found.prepared)?, found)));
    let (overview, found) = processes.agree(found, |(_, found)| found.identity())?;
    if processes.is_leader() {
        let restart = found.restart.as_ref();
        display::say(&restart.map_or_else(|| found.introduction(), Restart::sentence));
        found.rate_note.iter().for_each(|note| display::say(note));
    }
    if found.is_finished() {
        // The process that would have removed the copies may have been killed.
        if RunPath::of(&arguments.run)?.checkpoint.is_none() {
            state_copies::remove_all(processes, &found.prepared.settings)?;
        }
        return Ok(());
    }
    let ResumableRun {
        prepared, description, evaluations, checkpoint, saved, owned, restart, origin, ..
    } = found;
    if processes.is_leader()
        && let Err(failure) = state_copies::require_space(&prepared)
    {
        display::say(&format!("warning: {}", failure.text()));
    }
    let settings = prepared.settings.clone();
    let copies = state_copies::place_of(processes, &settings, true, origin)?;
    let hosts = RankHosts::find(processes, &settings)?;
    let (efficiency, space) = (Efficiency::of(&prepared), CheckpointSpace::of(prepared.parts()));
    let mut trainer = match &checkpoint {
        Some(checkpoint) => launch_from(prepared, checkpoint, processes, attempts)?,
        None => launch(prepared, processes, attempts)?,
    };
    let done = trainer.steps_done();
    // Copies of later steps are removed first: if this process is killed in between, the metrics still have
    // the lines of the newest copy.
    let copies = StateCopies::begin(copies, &settings, done, owned.is_some());
    let copies = copies.map_err(|failure| abandon(&mut trainer, failure))?;
    let reopened = owned.map(|owned| RunFolder::reopen(&settings.run.out, &settings.to_toml(), done, owned));
    let refusal = |error: RunFolderError| {
        // A disk that was full may be full again.
        let fault = Fault::of_full_disk(&error, done, || space.bytes());
        Failure::input(error).with_fault(fault)
    };
    let mut folder = reopened.transpose().map_err(|error| abandon(&mut trainer, refusal(error)))?;
    if let (Some(folder), Some(restart)) = (&mut folder, &restart) {
        folder.write_restart(restart).map_err(|error| abandon(&mut trainer, refusal(error)))?;
    } else {
        folder.iter().flat_map(RunFolder::moved).for_each(|sentence| display::say(sentence));
    }
    if let Some(folder) = &folder {
        folder.lost().into_iter().for_each(display::say);
        trainer.set_earlier(folder.earlier());
    }
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
        saved,
        processes,
        attempts,
    }
    .run(trainer)
}

/// Locks the run's folder if this process writes to it, so that no other run can write to it.
fn own(arguments: &ResumeArguments, owns: bool) -> Result<Option<RunLock>, Failure> {
    let out = RunPath::of(&arguments.run)?.run;
    if !owns {
        return Ok(None);
    }
    run_folder::config_of(&out).map_err(Failure::input)?;
    RunLock::take(&out).map(Some).map_err(Failure::input)
}

/// A run to resume.
struct ResumableRun {
    prepared: Prepared,
    description: Map<String, Value>,
    evaluations: Evaluations,
    checkpoint: Option<Arc<Checkpoint>>,
    /// The copy in memory from which the run resumes, if it does.
    origin: Option<Origin>,
    /// The step of the newest checkpoint on the disk up to there; 0 if there is none.
    saved: u64,
    /// The locks of the run's folder, in the process that writes to it.
    owned: Option<RunLock>,
    /// A sentence about a jump of the learning rate.
    rate_note: Option<String>,
    /// The restart that led to this resumption, in the process that writes to the folder.
    restart: Option<Restart>,
}

impl ResumableRun {
    /// Reads a run, and its state from a `copy` in memory if there is one. `searched` is the time of the
    /// search for a copy. `restart` is the record of the restart that leads to this, unless `launch` has left
    /// it in the folder.
    fn find(
        arguments: &ResumeArguments,
        (copy, searched): (Option<FoundCopy>, Duration),
        owned: Option<RunLock>,
        restart: Option<Restart>,
    ) -> Result<Self, Failure> {
        let path = RunPath::of(&arguments.run)?;
        let config = run_folder::config_of(&path.run).map_err(Failure::input)?;
        let restart = owned.as_ref().and_then(|_| {
            restart.or_else(|| Restart::find(&path.run, launched_start().filter(|number| *number > 0)?))
        });
        // The first attempt has printed the notes.
        let prints_notes = owned.is_some() && restart.is_none();
        let set = arguments.overrides(&path)?;
        let loaded = load_settings(Some(&config), &set)?;
        if prints_notes {
            loaded.notes.iter().for_each(|note| display::say(note));
        }
        let mut state = read_state(&path, copy, searched)?;
        let model = read_model(&loaded.settings)?;
        let prepared = prepare_settings(scheduled(loaded)?, model)?;
        if prints_notes {
            prepared.notes.iter().for_each(|note| display::say(note));
        }
        let mut description = describe(&prepared)?;
        if let Some(checkpoint) = &state.checkpoint {
            require_same(&description, checkpoint)?;
            require_numbers(checkpoint)?;
            require_no_more_steps(&prepared, checkpoint)?;
        }
        let mut evaluations = Evaluations::new(&prepared, state.checkpoint.as_deref());
        if let Some(loss) = state.checkpoint.as_ref().and_then(|state| state.manifest().description.get(LOSS))
        {
            // The checkpoint may be written again, after an evaluation that was left out.
            description.insert(LOSS.to_owned(), loss.clone());
        }
        if state.origin.is_some() && evaluations.are_exhausted() {
            // The run ends with the state that it resumes from, so that state must be on the disk.
            state = read_state(&path, None, searched)?;
            evaluations = Evaluations::new(&prepared, state.checkpoint.as_deref());
        }
        let done = state.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step());
        // The stored settings are those before the arguments.
        let stored = load_settings(Some(&config), &set[set.len() - 1..]).ok();
        let rate_note = stored
            .and_then(|stored| rate_change::note(&stored.settings, &prepared.settings, done, &arguments.set));
        let restart = restart.map(|restart| {
            if has_copies(&path.run) {
                restart.with_state(done, state.source, state.bytes(), state.took)
            } else {
                Restart { step: done, ..restart }
            }
        });
        let StateRead { checkpoint, origin, .. } = state;
        let saved = if origin.is_some() { newest_step(&path)? } else { done };
        Ok(Self { prepared, description, evaluations, checkpoint, origin, saved, owned, rate_note, restart })
    }

    /// Returns the fields that must be equal in all processes.
    fn identity(&self) -> Fields {
        let mut fields = identity(&self.prepared, &self.description);
        let files = self.checkpoint.as_deref().map(checkpoint_files).unwrap_or_default();
        fields.insert("checkpoint".to_owned(), files);
        fields
    }

    /// Returns whether the checkpoint is the one of the run's last step, or the run ended early, and no evaluation is
    /// left out.
    fn is_finished(&self) -> bool {
        self.evaluations.left_out().is_none()
            && self.checkpoint.as_ref().is_some_and(|checkpoint| {
                checkpoint.step() == self.prepared.settings.run.steps || self.evaluations.are_exhausted()
            })
    }

    /// Returns a sentence that says from which step the run resumes, or why it does not.
    fn introduction(&self) -> String {
        let run = &self.prepared.settings.run;
        let out = quoted(&run.out.to_string_lossy());
        match &self.checkpoint {
            Some(checkpoint) if checkpoint.step() < run.steps && self.is_finished() => format!(
                "the run ended early, after step {}: {} evaluations had found no lower validation loss; to train on \
                 until step {}: pipewright resume {out} --set run.patience=0",
                checkpoint.step(),
                run.patience,
                run.steps
            ),
            Some(checkpoint) if self.is_finished() => format!(
                "the run is finished: all {} steps are taken, and the model is saved in {}; to train on, ask for more \
                 steps: {}",
                run.steps,
                checkpoint.path().display(),
                rate_change::continuations(&self.prepared.settings, run.steps.saturating_mul(2))
            ),
            Some(checkpoint) => {
                format!("resuming from step {}, {}", checkpoint.step(), checkpoint.path().display())
            }
            None => "the run has no checkpoint: starting again from step 1, with the same seed".to_owned(),
        }
    }
}

/// Returns the settings with their schedule. Refuses settings that leave the choice to a plan.
fn scheduled(loaded: Loaded) -> Result<Scheduled, Failure> {
    loaded.scheduled().map_err(|_| {
        Failure::input(
            "`pipeline.schedule` is \"auto\", which only `train` and `check` plan: a run resumes with the plan that it stored, \
             so leave the key out, or name a schedule",
        )
    })
}

/// The state of a run, as it was read.
struct StateRead {
    /// `None` if the run has no state yet.
    checkpoint: Option<Arc<Checkpoint>>,
    source: StateSource,
    /// The copy in memory that it is.
    origin: Option<Origin>,
    /// The time that finding and reading it took.
    took: Duration,
}

impl StateRead {
    fn bytes(&self) -> u64 {
        let files = self.checkpoint.iter().flat_map(|checkpoint| &checkpoint.manifest().files);
        files.map(|file| file.bytes).sum()
    }
}

/// Reads the state of a run: from a copy in memory if there is one, and otherwise from the disk. `searched` is
/// the time of the search for a copy.
fn read_state(path: &RunPath, copy: Option<FoundCopy>, searched: Duration) -> Result<StateRead, Failure> {
    let began = Instant::now();
    Ok(match copy {
        None => {
            let checkpoint = open(path)?;
            let took = searched + began.elapsed();
            StateRead { checkpoint, source: StateSource::Disk, origin: None, took }
        }
        Some(FoundCopy { copy, origin, source, took }) => {
            StateRead { checkpoint: Some(Arc::new(copy)), source, origin: Some(origin), took }
        }
    })
}

/// Returns the step of the newest checkpoint of a run; 0 if there is none.
fn newest_step(path: &RunPath) -> Result<u64, Failure> {
    let saved = CheckpointFolder::list(&run_folder::checkpoints_of(&path.run)).map_err(Failure::input)?;
    Ok(saved.last().map_or(0, |(step, _)| *step))
}

/// Opens the checkpoint that the path names, or else the newest checkpoint of the run. Returns `None` if the
/// run has no checkpoint.
fn open(path: &RunPath) -> Result<Option<Arc<Checkpoint>>, Failure> {
    let opened = match &path.checkpoint {
        Some(checkpoint) => Checkpoint::open(checkpoint),
        None => CheckpointFolder::newest(&run_folder::checkpoints_of(&path.run)),
    };
    match opened {
        Ok(checkpoint) => Ok(Some(Arc::new(checkpoint))),
        Err(CheckpointError::NoneComplete { .. }) => Ok(None),
        Err(error) => Err(Failure::input(error)),
    }
}

/// Refuses a checkpoint with a parameter that has NaN: every loss would be NaN.
fn require_numbers(checkpoint: &Checkpoint) -> Result<(), Failure> {
    if checkpoint.not_finite().all(|(_, found)| found.nan == 0) {
        return Ok(());
    }
    Err(Failure::input(not_finite(checkpoint).unwrap_or_default()))
}

/// Refuses settings with fewer steps than the checkpoint.
fn require_no_more_steps(prepared: &Prepared, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let (done, steps) = (checkpoint.step(), prepared.settings.run.steps);
    if done <= steps {
        return Ok(());
    }
    let place = checkpoint.path().display();
    Err(Failure::input(format!(
        "{place}: the checkpoint is of step {done}, and run.steps = {steps}; ask for more steps, or name an earlier \
         checkpoint of the run"
    )))
}
