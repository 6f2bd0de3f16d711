//! The messages in which the processes of a run share the files of the first one, before they train.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pipewright::checkpoint::{Checkpoint, MANIFEST};
use pipewright::train::Validation;
use pipewright::train::data::TokenRows;
use pipewright::transport::Fields;
use pipewright_gguf::container::are_parts;
use pipewright_models::hf;
use serde::{Deserialize, Serialize};
use toml::Value;

use crate::error::{ErrorKind, RunError};
use crate::fault::Start;
use crate::resume::Resumption;
use crate::run_folder::{CONFIG, RunLock, checkpoints_of};
use crate::settings::adapter::AdapterSource;
use crate::settings::model::ModelSettings;
use crate::settings::pipeline::ScheduleChoice;
use crate::settings::{Loaded, Settings};
use crate::training::checkpoint_path::RunPath;
use crate::training::copies_link::machine;
use crate::training::load::load_settings;
use crate::training::prepare::Prepared;
use crate::training::process_group::ProcessGroup;
use crate::training::remote_files::{
    Client, Entry, FileService, Files, Folder, Mirror, Offer, OfferedFolder, Outlines, RemoteData,
    RemoteFiles, Wanted, bring, bring_pieces, time_to_send, unwritten,
};
use crate::training::shared_folder::{Token, is_seen, unwritable};

/// The files of the first process, as the others learn of them.
#[derive(Serialize, Deserialize)]
struct FirstFiles {
    /// A file that the processes on the same host see, and the host.
    token: PathBuf,
    machine: String,
    /// The effective configuration.
    config: String,
    /// The name and the text of the file of the schedule, if it has one.
    schedule: Option<(String, String)>,
    model: Option<ModelFiles>,
    /// Whether adapters are trained, and the files in their folder if they have one.
    has_adapters: bool,
    adapter: Option<Vec<Entry>>,
    deadline: Duration,
}

/// The files of the model that the settings name: a folder or a file.
#[derive(Serialize, Deserialize)]
struct ModelFiles {
    entries: Vec<Entry>,
    /// The name of the file if it is one.
    file: Option<String>,
}

impl FirstFiles {
    fn of(settings: &Settings, token: &Token) -> Result<Self, RunError> {
        let token =
            std::path::absolute(token.file()).map_err(|error| unwritable(&settings.run.out, &error))?;
        let schedule = match &settings.pipeline.schedule {
            ScheduleChoice::Csv(file) => {
                let text = fs::read_to_string(file);
                let unreadable =
                    |error| RunError::input(format!("{}: cannot be read: {error}", file.display()));
                let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                Some((name, text.map_err(unreadable)?))
            }
            ScheduleChoice::Named(_) => None,
        };
        if !settings.model.added_tokens().is_empty() {
            return Err(RunError::input(
                "`model.add_tokens`: hosts that share no folder have no tokenizer: write the model with `pipewright add-tokens`, and \
                 name that in `model.from`",
            ));
        }
        let (model, adapter) = (model_folder(settings), adapter_folder(settings));
        Ok(Self {
            token,
            machine: machine(),
            config: settings.to_toml(),
            schedule,
            model: model.map(|(folder, file)| {
                let is_needed = |name: &str| match &file {
                    Some(file) => are_parts(Path::new(file), Path::new(name)),
                    None => {
                        name == "config.json"
                            || [".index.json", ".safetensors"].iter().any(|end| name.ends_with(end))
                    }
                };
                ModelFiles { entries: Entry::list(&folder, is_needed), file }
            }),
            has_adapters: settings.adapter.is_some(),
            adapter: adapter.map(|folder| {
                Entry::list(&folder, |name| name == "adapter_config.json" || name.ends_with(".safetensors"))
            }),
            deadline: settings.run.deadline(),
        })
    }

    /// Returns the time that the files may take to all of so many processes.
    fn time_to_bring(&self, processes: u32) -> Duration {
        let model = self.model.iter().flat_map(|model| &model.entries);
        let bytes = model.chain(self.adapter.iter().flatten()).map(|entry| entry.bytes);
        time_to_send(bytes.sum::<u64>().saturating_mul(processes.into()))
    }

    /// Returns what other processes may get of these files.
    fn offer(&self, settings: &Settings) -> Offer {
        let model = model_folder(settings).zip(self.model.as_ref());
        let adapter = adapter_folder(settings).zip(self.adapter.as_ref());
        Offer {
            model: model.map(|((folder, _), model)| OfferedFolder::new(folder, &model.entries)),
            adapter: adapter.map(|(folder, entries)| OfferedFolder::new(folder, entries)),
            ..Offer::default()
        }
    }

    /// Returns whether this process is on the host of the first one and sees its files.
    fn is_near(&self) -> bool {
        self.machine == machine() && is_seen(&self.token, Duration::ZERO)
    }

    /// Brings the small files, and writes the configuration with the paths of the mirror.
    fn bring(&self, client: &Client, mirror: &Mirror) -> Result<(), RunError> {
        let mut config: toml::Table =
            self.config.parse().map_err(|error| RunError::new(ErrorKind::Bug, error))?;
        let mut set = |section: &str, key: &str, path: &Path| {
            if let Some(Value::Table(section)) = config.get_mut(section) {
                section.insert(key.to_owned(), Value::String(path.display().to_string()));
            }
        };
        let run = mirror.run();
        set("run", "out", &run);
        if let Some((name, text)) = &self.schedule {
            let path = run.join(name);
            fs::write(&path, text).map_err(|error| unwritten(&path, &error))?;
            set("pipeline", "schedule", &path);
        }
        if let Some(ModelFiles { entries, file }) = &self.model {
            let folder = mirror.model();
            bring(client, Folder::Model, entries, &folder, false)?;
            if self.has_adapters && file.is_none() {
                // Checkpoints of adapters say to which weights they belong.
                let ranges = hf::fingerprint_ranges(&folder).map_err(RunError::input)?;
                let wanted = ranges.into_iter().map(|(name, ranges)| Wanted {
                    folder: Folder::Model,
                    path: folder.join(name),
                    ranges,
                });
                bring_pieces(client, &wanted.collect::<Vec<_>>())?;
            }
            set("model", "from", &file.as_ref().map_or(folder.clone(), |file| folder.join(file)));
        }
        if let Some(entries) = &self.adapter {
            bring(client, Folder::Adapter, entries, &mirror.adapter(), true)?;
            set("adapter", "path", &mirror.adapter());
        }
        let path = run.join(CONFIG);
        let text = toml::to_string(&config).map_err(|error| RunError::new(ErrorKind::Bug, error))?;
        fs::write(&path, text).map_err(|error| unwritten(&path, &error))
    }
}

/// Returns the folder of the model that the settings name, and the name of its file if it is only one.
fn model_folder(settings: &Settings) -> Option<(PathBuf, Option<String>)> {
    let ModelSettings::From { from, .. } = &settings.model else { return None };
    if !from.is_file() {
        return Some((from.clone(), None));
    }
    let folder = from.parent().unwrap_or(Path::new("")).to_owned();
    Some((folder, Some(from.file_name()?.to_string_lossy().into_owned())))
}

/// Returns the folder of the adapters that the settings name.
fn adapter_folder(settings: &Settings) -> Option<PathBuf> {
    match &settings.adapter.as_ref()?.source {
        AdapterSource::From { path, .. } => Some(path.clone()),
        AdapterSource::New { .. } => None,
    }
}

/// Returns whether the hosts of this launch share no folder.
fn sends_files(processes: &ProcessGroup) -> bool {
    processes.is_several() && Start::of_this_process().is_some_and(|start| start.sends_files)
}

/// Loads the settings of a run: `load` does it in a process that has the files. All processes call it.
///
/// # Errors
/// Fails in all processes if the first one cannot load them, and if the processes do not reach each other. The inner error
/// belongs to this process.
pub(crate) fn begin_new(
    processes: &mut ProcessGroup,
    load: impl FnOnce() -> Result<Loaded, RunError>,
) -> Result<Result<Loaded, RunError>, RunError> {
    if !sends_files(processes) {
        return Ok(load());
    }
    if processes.is_leader() {
        let loaded = processes.agree(load(), |_| Fields::new())?;
        let settings = &loaded.settings;
        begin(processes, Some((settings, settings.run.out.clone())))?;
        return Ok(Ok(loaded));
    }
    processes.agree(Ok(()), |()| Fields::new())?;
    begin(processes, None)?;
    Ok(match processes.files() {
        Files::Remote(remote) => load_settings(Some(&remote.mirror.run().join(CONFIG)), &[]),
        _ => load(),
    })
}

/// Reads the run that resumes: `read` does it in a process that has the files, with the lock of the folder in the first
/// one. All processes call it.
///
/// # Errors
/// As [`begin_new`].
pub(crate) fn begin_resumed(
    processes: &mut ProcessGroup,
    read: impl FnOnce(bool) -> Result<(Resumption, Option<RunLock>), RunError>,
) -> Result<(Resumption, Option<RunLock>), RunError> {
    let is_leader = processes.is_leader();
    if !sends_files(processes) {
        // The leader locks the folder and cleans it up before the other processes read it.
        return processes.agree(read(is_leader), |_| Fields::new());
    }
    if is_leader {
        let read = read(true).and_then(|read| Ok((read.0.load()?, read)));
        let (loaded, read) = processes.agree(read, |_| Fields::new())?;
        begin(processes, Some((&loaded.settings, read.0.path.run.clone())))?;
        return Ok(read);
    }
    processes.agree(Ok(()), |()| Fields::new())?;
    begin(processes, None)?;
    match processes.files() {
        Files::Remote(remote) => {
            let path = RunPath { run: remote.mirror.run(), checkpoint: None };
            Ok((Resumption::of(path), None))
        }
        _ => read(false),
    }
}

/// Lets each process know where the files of the first one are. `own` are the settings and the folder of the run, in the
/// first process.
fn begin(processes: &mut ProcessGroup, own: Option<(&Settings, PathBuf)>) -> Result<(), RunError> {
    let channel = processes.file_channel();
    let channel = channel.ok_or_else(|| RunError::new(ErrorKind::Bug, "several processes have a channel"))?;
    let prepared = own.map(|(settings, run)| {
        let token = Token::create(&run).map_err(|error| unwritable(&run, &error))?;
        let first = FirstFiles::of(settings, &token)?;
        let offer = first.offer(settings);
        let service = FileService::start(channel.clone(), offer, checkpoints_of(&run), first.deadline)?;
        Ok((first, token, service))
    });
    let prepared = processes.agree(prepared.transpose(), |_| Fields::new())?;
    let (first, token, service) = match prepared {
        Some((first, token, service)) => (Some(first), Some(token), Some(service)),
        None => (None, None, None),
    };
    let first: Option<FirstFiles> = processes.share_value(&first)?;
    let first = first.ok_or_else(|| RunError::new(ErrorKind::Bug, "the first process has files"))?;
    let files = match service {
        Some(service) => Ok(Files::First(service)),
        None if first.is_near() => Ok(Files::Near),
        None => Mirror::create().and_then(|mirror| {
            // If the first process is lost, its missing heartbeats are noticed first and say more.
            let client = Arc::new(Client::new(channel, first.deadline.saturating_mul(2)));
            first.bring(&client, &mirror)?;
            Ok(Files::Remote(RemoteFiles { client, mirror }))
        }),
    };
    // The first process keeps the token until all others have looked for it.
    let work = first.time_to_bring(processes.count());
    let files = processes.all_succeed_within(files, ErrorKind::WrongInput, work)?;
    drop(token);
    processes.set_files(files);
    processes.set_deadline(first.deadline);
    Ok(())
}

/// Returns the data of the run in a process that has no files, and `None` in another one. All processes call it. The ones with
/// files pass the prepared run.
///
/// # Errors
/// Fails if the data of the first process cannot be read, and if the processes do not reach each other.
pub(crate) fn share_rows(
    processes: &mut ProcessGroup,
    prepared: Option<&Prepared>,
) -> Result<Option<RemoteData>, RunError> {
    if matches!(processes.files(), Files::Shared) {
        return Ok(None);
    }
    let outlines = prepared.filter(|_| processes.is_leader()).map(|prepared| -> Result<_, RunError> {
        let validation = prepared.validation.as_ref().map(Validation::rows);
        Ok(Outlines {
            training: prepared.rows.outline().map_err(RunError::input)?,
            validation: validation.map(TokenRows::outline).transpose().map_err(RunError::input)?,
        })
    });
    // An outline may need all ids of the data.
    let outlines = processes.agree_on_preparation(outlines.transpose())?;
    if let (Files::First(service), Some(prepared)) = (processes.files(), prepared) {
        service.change(|offer| {
            offer.training = Some(prepared.rows.clone());
            offer.validation = prepared.validation.as_ref().map(|validation| validation.rows().clone());
        });
    }
    let outlines: Option<Outlines> = processes.share_value(&outlines)?;
    Ok(match processes.files() {
        Files::Remote(remote) => {
            outlines.map(|outlines| RemoteData { outlines, client: remote.client.clone() })
        }
        _ => None,
    })
}

/// Brings the checkpoint from which the run resumes into the mirrors, without its tensors. All processes call it, the first
/// one with the checkpoint if it is on its disk.
///
/// # Errors
/// Fails if it cannot be sent.
pub(crate) fn share_state(
    processes: &mut ProcessGroup,
    checkpoint: Option<&Checkpoint>,
) -> Result<(), RunError> {
    if matches!(processes.files(), Files::Shared) {
        return Ok(());
    }
    let own = checkpoint.filter(|_| processes.is_leader()).map(|checkpoint| {
        let name = checkpoint.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        (name, Entry::list(checkpoint.path(), |name| name == MANIFEST || name.ends_with(".safetensors")))
    });
    if let (Files::First(service), Some(checkpoint), Some((_, entries))) =
        (processes.files(), checkpoint, &own)
    {
        let folder = OfferedFolder::new(checkpoint.path().to_owned(), entries);
        service.change(|offer| offer.checkpoint = Some(folder));
    }
    let shared: Option<(String, Vec<Entry>)> = processes.share_value(&own)?;
    let bytes: u64 = shared.iter().flat_map(|(_, entries)| entries).map(|entry| entry.bytes).sum();
    let work = time_to_send(bytes.saturating_mul(processes.count().into()));
    let brought = match (processes.files(), shared) {
        (Files::Remote(remote), Some((name, entries))) => {
            let folder = checkpoints_of(&remote.mirror.run()).join(name);
            bring(&remote.client, Folder::Checkpoint, &entries, &folder, false)
        }
        _ => Ok(()),
    };
    processes.all_succeed_within(brought, ErrorKind::WrongInput, work)
}
