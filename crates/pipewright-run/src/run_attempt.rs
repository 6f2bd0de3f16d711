//! An attempt at a run: it prepares the run, in all of its processes, then starts the ranks and trains. [`Run`](crate::run::Run)
//! makes the next attempt after a fault.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use pipewright_models::CutModel;
use serde_json::{Map, Value};

use crate::error::{FailedRun, RunError};
use crate::fault::Fault;
use crate::file_exchange;
use crate::observer::{Observer, Overview};
use crate::recovery::{Attempts, RESTART, Restart};
use crate::resume::{ResumableRun, Resumption, StartingRun};
use crate::run_folder::{self, RunFolder, RunFolderError, RunLock};
use crate::run_model::RunModel;
use crate::run_record::RunEvent;
use crate::settings::{Loaded, Scheduled, Settings};
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::copies_link::{link_of, remove_copies};
use crate::training::efficiency::Efficiency;
use crate::training::evaluations::Evaluations;
use crate::training::identity::{describe, identity, shared_settings};
use crate::training::launch::{abandon, launch};
use crate::training::layer_mover::LayerMover;
use crate::training::model::{read_model, require_family};
use crate::training::overview::overview;
use crate::training::prepare::{Prepared, prepare_with};
use crate::training::process_group::ProcessGroup;
use crate::training::rank_hosts::RankHosts;
use crate::training::reference::{Reference, check_file};
use crate::training::remote_files::{Files, RemoteData};
use crate::training::state_copies::{self, CopyPlace, StateCopies};
use crate::training::training_loop::TrainingLoop;
use crate::training::{copy_search, origin, shared_folder};

/// The parts that the caller adds to a run.
pub(crate) struct Parts {
    pub(crate) model: Option<Arc<dyn RunModel>>,
    pub(crate) planner: Option<Planner>,
    pub(crate) observer: Arc<dyn Observer>,
}

/// Chooses a schedule for settings that leave the choice to a plan.
pub(crate) type Planner = Box<dyn Fn(Settings, &CutModel, &mut ProcessGroup) -> Result<Chosen, RunError>>;

/// A run with the choice of a schedule.
pub struct Chosen<M = CutModel> {
    /// The settings with the schedule.
    pub scheduled: Scheduled,
    /// The model, with its head in the chosen number of parts.
    pub model: M,
    /// Sentences about the choice.
    pub sentences: Vec<String>,
    /// Names and texts of files for the folder of the run.
    pub files: Vec<(String, String)>,
}

impl<M> Chosen<M> {
    /// Returns the run of settings that name their schedule.
    pub fn named(scheduled: Scheduled, model: M) -> Self {
        Self { scheduled, model, sentences: Vec::new(), files: Vec::new() }
    }
}

/// A run that starts, prepared.
struct New {
    prepared: Prepared,
    /// The description of the run in its checkpoints.
    description: Map<String, Value>,
    overview: Overview,
    /// Names and texts of files for the folder of the run.
    files: Vec<(String, String)>,
}

impl New {
    /// Prepares a run, with the data of the first process on a host without data.
    fn prepare(
        chosen: Chosen<Arc<dyn RunModel>>,
        data: Option<&RemoteData>,
        processes: &mut ProcessGroup,
    ) -> Result<Self, RunError> {
        let Chosen { scheduled, model, sentences, files } = chosen;
        sentences.iter().for_each(|sentence| processes.note(sentence));
        let prepared = prepare_with(scheduled, model, data)?;
        processes.set_deadline(prepared.settings.run.deadline());
        state_copies::require_space(&prepared)?;
        prepared.notes.iter().for_each(|note| processes.note(note));
        if processes.is_leader() {
            run_folder::probe(&prepared.settings.run.out, &files).map_err(RunError::input)?;
        }
        let (description, overview) = (describe(&prepared)?, overview(&prepared)?);
        if data.is_none() {
            check_file(&prepared)?;
        }
        Ok(Self { prepared, description, overview, files })
    }
}

/// A run whose ranks can be started.
struct Ready {
    run: StartingRun,
    overview: Overview,
    folder: FolderSource,
}

/// The folder that the leader makes once the ranks are started.
enum FolderSource {
    /// A folder for these files. An earlier run there is moved aside.
    New(Vec<(String, String)>),
    /// The folder of the run itself, which the leader has locked.
    Locked(Option<RunLock>, Option<Restart>),
}

impl Parts {
    /// Trains from the first step.
    pub(crate) fn start(
        &self,
        load: impl FnOnce() -> Result<Loaded, RunError>,
        processes: &mut ProcessGroup,
        attempts: &mut Attempts,
    ) -> Result<(), RunError> {
        let loaded = file_exchange::begin_new(processes, load)?;
        let chosen = self.choose(loaded, processes)?;
        let new = if matches!(processes.files(), Files::Remote(_)) {
            let chosen = processes.agree_on_preparation(chosen)?;
            let data = file_exchange::share_rows(processes, None)?;
            New::prepare(chosen, data.as_ref(), processes)
        } else {
            let new = chosen.and_then(|chosen| New::prepare(chosen, None, processes));
            if matches!(processes.files(), Files::Shared) {
                new
            } else {
                let new = processes.agree_on_preparation(new)?;
                file_exchange::share_rows(processes, Some(&new.prepared))?;
                Ok(new)
            }
        };
        let New { prepared, description, overview, files } =
            processes.agree(new, |new| identity(&new.prepared, &new.description))?;
        if matches!(processes.files(), Files::Shared) {
            shared_folder::require(processes, &prepared.settings.run.out)?;
        }
        let evaluations = Evaluations::new(&prepared, None);
        let run =
            StartingRun { prepared, description, evaluations, checkpoint: None, origin: None, saved: 0 };
        self.launch(Ready { run, overview, folder: FolderSource::New(files) }, processes, attempts)
    }

    /// Returns the run with a schedule, which is planned if the settings leave the choice to a plan. The inner result
    /// belongs to this process, and the processes compare it afterwards. The outer error belongs to all processes,
    /// because they compare their settings before they measure.
    fn choose(
        &self,
        loaded: Result<Loaded, RunError>,
        processes: &mut ProcessGroup,
    ) -> Result<Result<Chosen<Arc<dyn RunModel>>, RunError>, RunError> {
        let loaded = match loaded {
            Ok(loaded) => loaded,
            Err(error) => return Ok(Err(error)),
        };
        let family = match &self.model {
            Some(_) => match require_family(&loaded.settings) {
                Ok(()) => None,
                Err(error) => return Ok(Err(error)),
            },
            None => match read_model(&loaded.settings) {
                Ok(model) => Some(model),
                Err(error) => return Ok(Err(error)),
            },
        };
        loaded.notes.iter().for_each(|note| processes.note(note));
        let settings = match loaded.scheduled() {
            Ok(scheduled) => {
                let own = self.model.clone().or_else(|| Some(Arc::new(family?)));
                let model = own.expect("a model of the caller or of the settings");
                return Ok(Ok(Chosen::named(scheduled, model)));
            }
            Err(settings) => settings,
        };
        let (Some(planner), Some(family)) = (&self.planner, family) else {
            let message = "`pipeline.schedule` is \"auto\", and nothing plans this run: name a schedule";
            return Ok(Err(RunError::input(message)));
        };
        let settings = processes.agree(Ok(settings), |settings| shared_settings(settings))?;
        processes.set_deadline(settings.run.deadline());
        let Chosen { scheduled, model, sentences, files } = planner(*settings, &family, processes)?;
        Ok(Ok(Chosen { scheduled, model: Arc::new(model), sentences, files }))
    }

    /// Continues the run in a folder.
    pub(crate) fn resume(
        &self,
        path: &Path,
        set: &[String],
        processes: &mut ProcessGroup,
        attempts: &mut Attempts,
    ) -> Result<(), RunError> {
        let (mut resumption, lock) = file_exchange::begin_resumed(processes, |owns| {
            let resumption = Resumption::new(path, set)?;
            let lock = resumption.own(owns)?;
            Ok((resumption, lock))
        })?;
        if matches!(processes.files(), Files::Shared) {
            shared_folder::require(processes, &resumption.path.run)?;
        }
        let restart = attempts.take_restart();
        let steps = resumption.load().ok().map(|loaded| loaded.settings.run.steps);
        let began = Instant::now();
        let copy = copy_search::newest(processes, &resumption.path, steps)?;
        let state = (copy, began.elapsed());
        // The overview may read all data, as the rest of the preparation.
        let find = |resumption: &Resumption| {
            let found =
                ResumableRun::find(resumption, self.model.clone(), &*self.observer, state, lock, restart)?;
            Ok((overview(&found.run.prepared)?, found))
        };
        let found = match processes.files() {
            Files::Shared => find(&resumption),
            Files::Remote(_) => {
                processes.agree_on_preparation(Ok(()))?;
                resumption.data = file_exchange::share_rows(processes, None)?;
                file_exchange::share_state(processes, None)?;
                find(&resumption)
            }
            Files::First(_) | Files::Near => {
                let (overview, found) = processes.agree_on_preparation(find(&resumption))?;
                file_exchange::share_rows(processes, Some(&found.run.prepared))?;
                let on_disk = found.run.checkpoint.as_deref().filter(|_| found.run.origin.is_none());
                file_exchange::share_state(processes, on_disk)?;
                Ok((overview, found))
            }
        };
        let found =
            found.inspect(|(_, found)| processes.set_deadline(found.run.prepared.settings.run.deadline()));
        let (overview, found) = processes.agree(found, |(_, found)| found.identity())?;
        match &found.restart {
            Some(restart) if processes.is_leader() => {
                self.observer.event(&RunEvent::Restart(restart.clone()));
            }
            _ => processes.note(&found.introduction()),
        }
        found.notes.iter().for_each(|note| processes.note(note));
        if found.is_finished() {
            // The process that would have removed the copies may have been killed.
            if resumption.path.checkpoint.is_none() {
                state_copies::remove_all(processes, &found.run.prepared.settings)?;
            }
            return Ok(());
        }
        if processes.is_leader()
            && let Err(error) = state_copies::require_space(&found.run.prepared)
        {
            processes.note(&format!("warning: {}", error.text()));
        }
        let ResumableRun { run, owned, restart, .. } = found;
        self.launch(
            Ready { run, overview, folder: FolderSource::Locked(owned, restart) },
            processes,
            attempts,
        )
    }

    /// Starts the ranks, then opens the folder, so that a run that cannot start does not change it, and trains.
    fn launch(
        &self,
        ready: Ready,
        processes: &mut ProcessGroup,
        attempts: &mut Attempts,
    ) -> Result<(), RunError> {
        let Ready { run, overview, folder } = ready;
        let StartingRun { prepared, description, evaluations, checkpoint, origin, saved } = run;
        let settings = prepared.settings.clone();
        let continues = matches!(folder, FolderSource::Locked(..));
        let place = state_copies::place_of(processes, &settings, continues, origin)?;
        let hosts = RankHosts::find(processes, &settings)?;
        let (efficiency, space) = (Efficiency::of(&prepared), CheckpointSpace::of(prepared.parts()));
        let mover = LayerMover::of(&prepared, self.model.is_some())?;
        file_exchange::fetch_parameters(processes, &prepared, checkpoint.as_deref())?;
        let reference = Reference::of(&prepared, &description);
        let mut trainer = launch(prepared, checkpoint.as_ref(), processes, attempts)?;
        let opened = match folder {
            FolderSource::New(files) => self.create_folder(&settings, &files, place, processes),
            FolderSource::Locked(lock, restart) => {
                self.reopen_folder(&settings, lock, restart.as_ref(), trainer.steps_done(), &space, place)
            }
        };
        let (folder, copies) = opened.map_err(|error| abandon(&mut trainer, error))?;
        if let Some(reference) = reference {
            let provided = reference.provide(&mut trainer, processes);
            provided.map_err(|error| abandon(&mut trainer, error))?;
        }
        if let Some(folder) = &folder {
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
            mover,
            copies,
            saved,
            processes,
            attempts,
        }
        .run(trainer)
    }

    fn create_folder(
        &self,
        settings: &Settings,
        files: &[(String, String)],
        place: CopyPlace,
        processes: &ProcessGroup,
    ) -> Result<(Option<RunFolder>, Option<StateCopies>), RunError> {
        let mut folder = None;
        if processes.is_leader() {
            let earlier = link_of(&settings.run.out);
            let created = RunFolder::create(&settings.run.out, &settings.to_toml(), files);
            let created = created.map_err(RunError::input)?;
            processes.note_begun();
            created.moved().iter().for_each(|sentence| self.observer.note(sentence));
            // The copies of the run that was moved aside. While it existed, it might have run.
            earlier.iter().for_each(|copies| remove_copies(copies));
            if self.model.is_none() {
                origin::keep(settings)?;
            }
            folder = Some(created);
        }
        let copies = StateCopies::begin(place, settings, 0, folder.is_some())?;
        Ok((folder, copies))
    }

    fn reopen_folder(
        &self,
        settings: &Settings,
        lock: Option<RunLock>,
        restart: Option<&Restart>,
        done: u64,
        space: &CheckpointSpace,
        place: CopyPlace,
    ) -> Result<(Option<RunFolder>, Option<StateCopies>), RunError> {
        // Copies of later steps are removed first: if this process is killed in between, the metrics still have
        // the lines of the newest copy.
        let copies = StateCopies::begin(place, settings, done, lock.is_some())?;
        let Some(lock) = lock else { return Ok((None, copies)) };
        let refusal = |error: RunFolderError| {
            // A disk that was full may be full again.
            let fault = Fault::of_full_disk(&error, done, || space.bytes());
            RunError::input(error).with_fault(fault)
        };
        let reopened = RunFolder::reopen(&settings.run.out, &settings.to_toml(), done, lock);
        let mut folder = reopened.map_err(refusal)?;
        match restart {
            Some(restart) => {
                folder.append(restart).map_err(refusal)?;
                RESTART.remove(folder.path());
            }
            None => folder.moved().iter().for_each(|sentence| self.observer.note(sentence)),
        }
        folder.lost().into_iter().for_each(|sentence| self.observer.note(sentence));
        Ok((Some(folder), copies))
    }
}
