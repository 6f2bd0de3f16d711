//! Finds the state from which a run resumes, and checks that the run may continue with it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder};
use pipewright::transport::Fields;
use pipewright_document::text::quoted;
use serde_json::{Map, Value};

use crate::error::RunError;
use crate::fault::launched_start;
use crate::observer::Observer;
use crate::recovery::{RESTART, Restart, StateSource};
use crate::run_folder::{self, RunLock};
use crate::run_model::RunModel;
use crate::settings::{Loaded, Scheduled};
use crate::training::checkpoint_path::{RunPath, not_finite};
use crate::training::copies_link::{Origin, has_copies};
use crate::training::copy_search::FoundCopy;
use crate::training::evaluations::Evaluations;
use crate::training::identity::{LOSS, checkpoint_files, describe, identity, require_same};
use crate::training::load::load_settings;
use crate::training::model::{read_model, require_family};
use crate::training::optimizer::correction_note;
use crate::training::prepare::{Prepared, prepare_settings_with};
use crate::training::rate_change;
use crate::training::remote_files::RemoteData;

/// A run in a folder, and the texts that override its settings.
pub(crate) struct Resumption {
    /// The folder of the run and the checkpoint to resume from.
    pub(crate) path: RunPath,
    /// The overrides of the caller.
    set: Vec<String>,
    /// The data of the first process, if this process has no files. It reads only its own part of a checkpoint.
    pub(crate) data: Option<RemoteData>,
}

impl Resumption {
    /// Reads `path` as a run's folder, its folder of checkpoints, or a checkpoint in that folder.
    pub(crate) fn new(path: &Path, set: &[String]) -> Result<Self, RunError> {
        Ok(Self { set: set.to_vec(), ..Self::of(RunPath::of(path)?) })
    }

    /// Returns the resumption without overrides.
    pub(crate) fn of(path: RunPath) -> Self {
        Self { path, set: Vec::new(), data: None }
    }

    /// Loads the settings.
    pub(crate) fn load(&self) -> Result<Loaded, RunError> {
        let config = run_folder::config_of(&self.path.run).map_err(RunError::input)?;
        load_settings(Some(&config), &self.overrides()?)
    }

    /// Returns the overrides, with the folder of the run last.
    fn overrides(&self) -> Result<Vec<String>, RunError> {
        let mut set = self.set.clone();
        let out = self.path.run.display();
        if set.iter().any(|text| text.trim_start().starts_with("run.out")) {
            return Err(RunError::input(format!(
                "a run is resumed in its own folder, {out}; leave out run.out"
            )));
        }
        // The run may have been moved since it wrote its configuration.
        set.push(format!("run.out={}", toml::Value::String(out.to_string())));
        Ok(set)
    }

    /// Takes the lock of the run, if this process `owns` the folder. No other process can write there until the lock is
    /// dropped.
    pub(crate) fn own(&self, owns: bool) -> Result<Option<RunLock>, RunError> {
        if !owns {
            return Ok(None);
        }
        run_folder::config_of(&self.path.run).map_err(RunError::input)?;
        RunLock::take(&self.path.run).map(Some).map_err(RunError::input)
    }
}

/// Returns the settings with which the run in a folder resumes, with texts such as `run.steps=8` that override them.
///
/// # Errors
/// When the folder has no run, or the settings are wrong.
pub fn stored_settings(folder: &Path, set: &[String]) -> Result<Loaded, RunError> {
    Resumption::new(folder, set)?.load()
}

/// A run that is prepared, and the state from which it starts.
pub(crate) struct StartingRun {
    pub(crate) prepared: Prepared,
    /// The description of the run in its checkpoints.
    pub(crate) description: Map<String, Value>,
    pub(crate) evaluations: Evaluations,
    /// The state to start from; `None` for initial parameters.
    pub(crate) checkpoint: Option<Arc<Checkpoint>>,
    /// The copy in memory that the state is, if it is one.
    pub(crate) origin: Option<Origin>,
    /// The step of the newest checkpoint on the disk up to there; 0 if there is none.
    pub(crate) saved: u64,
}

/// A run to resume.
pub(crate) struct ResumableRun {
    pub(crate) run: StartingRun,
    /// The locks of the run's folder, in the process that writes to it.
    pub(crate) owned: Option<RunLock>,
    /// Sentences about what changes with the settings: the learning rate, and the correction of delayed updates.
    pub(crate) notes: Vec<String>,
    /// The restart that led to this resumption, in the process that writes to the folder.
    pub(crate) restart: Option<Restart>,
}

impl ResumableRun {
    /// Reads a run, and its state from a `copy` in memory if there is one. `searched` is the time of the
    /// search for a copy. `restart` is the record of the restart that leads to this, unless `launch` has left
    /// it in the folder.
    pub(crate) fn find(
        resumption: &Resumption,
        model: Option<Arc<dyn RunModel>>,
        observer: &dyn Observer,
        (copy, searched): (Option<FoundCopy>, Duration),
        owned: Option<RunLock>,
        restart: Option<Restart>,
    ) -> Result<Self, RunError> {
        let path = &resumption.path;
        let restart = owned.as_ref().and_then(|_| {
            // A restart that has failed has left its record behind.
            let number = launched_start().filter(|number| *number > 0);
            let left = || RESTART.find(&path.run).filter(|left| Some(left.number()) == number);
            restart.or_else(left)
        });
        // The first attempt has printed the notes.
        let prints_notes = owned.is_some() && restart.is_none();
        let loaded = resumption.load()?;
        if prints_notes {
            loaded.notes.iter().for_each(|note| observer.note(note));
        }
        let is_part = resumption.data.is_some();
        let mut state = read_state(path, is_part, copy, searched)?;
        let model = match model {
            Some(model) => {
                require_family(&loaded.settings)?;
                model
            }
            None => Arc::new(read_model(&loaded.settings)?),
        };
        let prepared = prepare_settings_with(scheduled(loaded)?, model, resumption.data.as_ref())?;
        if prints_notes {
            prepared.notes.iter().for_each(|note| observer.note(note));
        }
        let mut description = describe(&prepared)?;
        if let Some(checkpoint) = &state.checkpoint {
            require_same(&description, checkpoint)?;
            require_numbers(checkpoint)?;
        }
        let is_at_end = |state: &Arc<Checkpoint>| state.step() >= prepared.settings.run.steps;
        if state.origin.is_some() && state.checkpoint.as_ref().is_some_and(is_at_end) {
            // The last state must be on the disk. With `run.epochs`, the search for a copy did not know the number of steps.
            state = read_state(path, is_part, None, searched)?;
        }
        if let Some(checkpoint) = &state.checkpoint {
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
            state = read_state(path, is_part, None, searched)?;
            evaluations = Evaluations::new(&prepared, state.checkpoint.as_deref());
        }
        let done = state.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step());
        // The stored settings are those before the arguments.
        let stored = load_settings(
            Some(&path.run.join(run_folder::CONFIG)),
            &resumption.overrides()?[resumption.set.len()..],
        )
        .ok();
        let notes = stored.into_iter().flat_map(|Loaded { settings: before, .. }| {
            let after = &prepared.settings;
            [
                rate_change::note(&before, after, done, &resumption.set),
                correction_note(&before.optimizer, &after.optimizer, done),
            ]
        });
        let notes = notes.flatten().collect();
        let restart = restart.map(|restart| {
            if has_copies(&path.run) {
                restart.with_state(done, state.source, state.bytes(), state.took)
            } else {
                Restart { step: done, ..restart }
            }
        });
        let StateRead { checkpoint, origin, .. } = state;
        let saved = if origin.is_some() { newest_step(path)? } else { done };
        let run = StartingRun { prepared, description, evaluations, checkpoint, origin, saved };
        Ok(Self { run, owned, notes, restart })
    }

    /// Returns the fields that must be equal in all processes.
    pub(crate) fn identity(&self) -> Fields {
        let mut fields = identity(&self.run.prepared, &self.run.description);
        let files = self.run.checkpoint.as_deref().map(checkpoint_files).unwrap_or_default();
        fields.insert("checkpoint".to_owned(), files);
        fields
    }

    /// Returns whether the checkpoint is the one of the run's last step, or the run ended early, and no evaluation is
    /// left out.
    pub(crate) fn is_finished(&self) -> bool {
        let StartingRun { prepared, evaluations, checkpoint, .. } = &self.run;
        evaluations.left_out().is_none()
            && checkpoint.as_ref().is_some_and(|checkpoint| {
                checkpoint.step() == prepared.settings.run.steps || evaluations.are_exhausted()
            })
    }

    /// Returns a sentence that says from which step the run resumes, or why it does not.
    pub(crate) fn introduction(&self) -> String {
        let settings = &self.run.prepared.settings;
        let run = &settings.run;
        let out = quoted(&run.out.to_string_lossy());
        match &self.run.checkpoint {
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
                rate_change::continuations(settings, run.steps.saturating_mul(2))
            ),
            Some(checkpoint) => {
                format!("resuming from step {}, {}", checkpoint.step(), checkpoint.path().display())
            }
            None => "the run has no checkpoint: starting again from step 1, with the same seed".to_owned(),
        }
    }
}

/// Returns the settings with their schedule. Refuses settings that leave the choice to a plan.
fn scheduled(loaded: Loaded) -> Result<Scheduled, RunError> {
    loaded.scheduled().map_err(|_| {
        RunError::input(
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
/// the time of the search for a copy. If `is_part`, this host has only the parameters of its ranks.
fn read_state(
    path: &RunPath,
    is_part: bool,
    copy: Option<FoundCopy>,
    searched: Duration,
) -> Result<StateRead, RunError> {
    let began = Instant::now();
    Ok(match copy {
        None => {
            let checkpoint = if is_part { open_part(path)? } else { open(path)? };
            let took = searched + began.elapsed();
            StateRead { checkpoint, source: StateSource::Disk, origin: None, took }
        }
        Some(FoundCopy { copy, origin, source, took }) => {
            StateRead { checkpoint: Some(Arc::new(copy)), source, origin: Some(origin), took }
        }
    })
}

/// Returns the step of the newest checkpoint of a run; 0 if there is none.
fn newest_step(path: &RunPath) -> Result<u64, RunError> {
    let saved = CheckpointFolder::list(&run_folder::checkpoints_of(&path.run)).map_err(RunError::input)?;
    Ok(saved.last().map_or(0, |(step, _)| *step))
}

/// Opens the checkpoint that the path names, or else the newest checkpoint of the run. Returns `None` if the
/// run has no checkpoint.
fn open(path: &RunPath) -> Result<Option<Arc<Checkpoint>>, RunError> {
    let opened = match &path.checkpoint {
        Some(checkpoint) => Checkpoint::open(checkpoint),
        None => CheckpointFolder::newest(&run_folder::checkpoints_of(&path.run)),
    };
    match opened {
        Ok(checkpoint) => Ok(Some(Arc::new(checkpoint))),
        Err(CheckpointError::NoneComplete { .. }) => Ok(None),
        Err(error) => Err(RunError::input(error)),
    }
}

/// Opens the part of a checkpoint that this host has, if there is one.
fn open_part(path: &RunPath) -> Result<Option<Arc<Checkpoint>>, RunError> {
    let saved = CheckpointFolder::list(&run_folder::checkpoints_of(&path.run)).map_err(RunError::input)?;
    let opened = saved.last().map(|(_, checkpoint)| Checkpoint::open_part(checkpoint).map(Arc::new));
    opened.transpose().map_err(RunError::input)
}

/// Refuses a checkpoint with a parameter that has NaN: every loss would be NaN.
fn require_numbers(checkpoint: &Checkpoint) -> Result<(), RunError> {
    if checkpoint.not_finite().all(|(_, found)| found.nan == 0) {
        return Ok(());
    }
    Err(RunError::input(not_finite(checkpoint).unwrap_or_default()))
}

/// Refuses settings with fewer steps than the checkpoint.
fn require_no_more_steps(prepared: &Prepared, checkpoint: &Checkpoint) -> Result<(), RunError> {
    let (done, steps) = (checkpoint.step(), prepared.settings.run.steps);
    if done <= steps {
        return Ok(());
    }
    let place = checkpoint.path().display();
    Err(RunError::input(format!(
        "{place}: the checkpoint is of step {done}, and run.steps = {steps}; ask for more steps, or name an earlier \
         checkpoint of the run"
    )))
}
