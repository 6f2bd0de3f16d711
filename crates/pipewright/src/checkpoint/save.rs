//! Writes a checkpoint: the files into a scratch folder, then the manifest, then one rename.
//!
//! Several processes that share one folder may write files. Each process writes a note for every file, after
//! the file. The process that began the checkpoint commits it when it has read the notes of all ranks.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use burn::tensor::{BoolStore, DType};
use pipewright_system::bounded_file::{SMALL_TEXT, read_regular, write_fresh};
use serde::{Deserialize, Serialize};

use super::committed::{committed_name, create_folder, publish, scratch_name, sync_folder};
use super::error::CheckpointError;
use super::finite::NotFinite;
use super::folder::CheckpointFolder;
use super::identity::FolderIdentity;
use super::location::StoredShard;
use super::manifest::{MANIFEST, Manifest, StateFile};
use super::optimizer::{OLDER, take_apart};
use super::rank_file::{note_of, tensors_of};
use super::state::{HeldParameter, RankState, StageState};
use super::tensor_file::{
    self, Accepted, Content, FIELD, FROZEN, INDEX, LOSS_SCALE, Named, ROWS, SHARDS, STEP, WriteError,
};
use crate::ids::WorldRank;
use crate::loss_scale::LossScale;
use crate::tensor::ValueKind;
use crate::tensor::shard::RowShard;

/// A checkpoint that is being written. If it is dropped before [`Saving::commit`], the process that began it
/// removes the files.
#[derive(Debug)]
pub struct Saving {
    folder: FolderIdentity,
    scratch: PathBuf,
    step: u64,
    /// Whether this process removes the scratch folder.
    owns_scratch: bool,
    written: Arc<AtomicU64>,
}

impl Saving {
    /// Begins the checkpoint of `step` in a folder of checkpoints.
    ///
    /// # Errors
    /// When the path leads to another folder by now, or the system reports an error.
    pub fn begin(folder: &CheckpointFolder, step: u64) -> Result<Self, CheckpointError> {
        let mut saving = Self::join(folder.identity(), step)?;
        saving.owns_scratch = true;
        Ok(saving)
    }

    /// Takes part in a checkpoint that another process, the folder's owner, has begun or will begin.
    ///
    /// # Errors
    /// When the path leads to another folder by now, or the system reports an error.
    pub fn join(folder: &FolderIdentity, step: u64) -> Result<Self, CheckpointError> {
        folder.require()?;
        let scratch = folder.path().join(scratch_name(step));
        create_folder(&scratch)
            .map_err(CheckpointError::io("create", &scratch))
            .map_err(|error| folder.explain(error))?;
        Ok(Self { folder: folder.clone(), scratch, step, owns_scratch: false, written: Arc::default() })
    }

    /// Counts in `written` the bytes that are passed to the system.
    pub(super) fn counting(mut self, written: Arc<AtomicU64>) -> Self {
        self.written = written;
        self
    }

    /// Writes a rank's part and drops its tensors. The part is on disk when this returns.
    ///
    /// # Errors
    /// When the path leads to another folder by now, the system reports an error, a tensor's element type
    /// cannot be stored, two parameters have one path, or a parameter is not finite.
    pub fn write_file(&self, state: RankState) -> Result<StateFile, CheckpointError> {
        self.folder.require()?;
        self.write_part(state).map_err(|error| self.folder.explain(error))
    }

    fn write_part(&self, state: RankState) -> Result<StateFile, CheckpointError> {
        check_paths(std::slice::from_ref(&state))?;
        let RankState { rank, stages, loss_scale, memory } = state;
        let _counted = memory.count_this_thread();
        let name = tensors_of(rank);
        let mut texts = BTreeMap::from([(STEP.to_owned(), self.step.to_string())]);
        if let Some(LossScale { factor, updates, next }) = loss_scale {
            let next = if next == factor { String::new() } else { format!(" {next}") };
            texts.insert(LOSS_SCALE.to_owned(), format!("{factor} {updates}{next}"));
        }
        // All stages of a rank are sharded alike, and so are all their parameters but experts.
        let part = stages.iter().find_map(|stage| stage.row_shard);
        let names = Names::of(&stages);
        let rows = names.rows(&stages);
        if !rows.is_empty() {
            texts.insert(ROWS.to_owned(), serde_json::to_string(&rows).expect("row shards are plain data"));
        }
        let shards = names.shards(&stages);
        if !shards.is_empty() {
            texts.insert(SHARDS.to_owned(), serde_json::to_string(&shards).expect("shards are plain data"));
        }
        let held = stages.iter().flat_map(|stage| &stage.parameters);
        let frozen: Vec<&str> = held.filter(|held| held.is_frozen).map(|held| &*held.path).collect();
        if !frozen.is_empty() {
            texts.insert(FROZEN.to_owned(), serde_json::to_string(&frozen).expect("paths are plain data"));
        }
        let mut tensors = BTreeMap::new();
        for stage in stages {
            add_stage(stage, &names, &mut tensors, &mut texts)?;
        }
        let tensors = tensors.into_values().collect();
        let path = self.scratch.join(&name);
        let (bytes, hash) =
            tensor_file::write(&path, &texts, tensors, &self.written).map_err(|error| match error {
                WriteError::NotFinite { name, found } => self.not_finite(names.path_of(&name), found),
                WriteError::Other(error) => error,
            })?;
        let hash = hash.to_hex().to_string();
        let (has_shards, has_several, has_rows) =
            (!shards.is_empty(), !names.several.is_empty(), !rows.is_empty());
        Ok(StateFile { name, bytes, hash, part, has_shards, has_several, has_rows })
    }

    /// Writes a rank's part, and a note for the process that commits: the file is on disk, or a parameter of
    /// the rank is not finite.
    ///
    /// # Errors
    /// As [`Saving::write_file`].
    pub fn write_with_note(&self, state: RankState) -> Result<(), CheckpointError> {
        let rank = state.rank();
        let written = self.write_file(state);
        let note = match &written {
            Ok(file) => Note::File(file.clone()),
            Err(CheckpointError::NotFinite { parameter, found, .. }) => {
                Note::Refused { parameter: parameter.to_string(), found: *found }
            }
            Err(_) => return written.map(drop),
        };
        let left = self.leave_note(rank, &note);
        // A parameter that is not finite counts more than a note that cannot be left.
        written?;
        left
    }

    fn leave_note(&self, rank: WorldRank, note: &Note) -> Result<(), CheckpointError> {
        self.put(&note_of(rank), &serde_json::to_string(note).expect("a note is plain data"))
    }

    /// Writes a small file next to the files of the ranks. A reader never finds a part of it.
    pub(super) fn put(&self, name: &str, text: &str) -> Result<(), CheckpointError> {
        self.folder.require()?;
        let (path, draft) = (self.scratch.join(name), self.scratch.join(format!("{name}.draft")));
        let written = write_fresh(&draft, text.as_bytes()).and_then(|()| fs::rename(&draft, &path));
        written.map_err(CheckpointError::io("write", &path))
    }

    /// Returns the path of a file while the checkpoint is written.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// Returns the paths of the files that another process needs for the part of a rank, in their order, after
    /// [`Saving::write_with_note`] has returned `noted`: the file and its note, or only the note of a part that was refused.
    /// A part without a note is not complete.
    pub(super) fn noted_files(&self, rank: WorldRank, noted: &Result<(), CheckpointError>) -> Vec<PathBuf> {
        let names = match noted {
            Ok(()) => vec![tensors_of(rank), note_of(rank)],
            Err(CheckpointError::NotFinite { .. }) => vec![note_of(rank)],
            Err(_) => Vec::new(),
        };
        names.iter().map(|name| self.file(name)).collect()
    }

    /// Removes the manifest of a process that ended before it gave the checkpoint its final name.
    pub(super) fn remove_manifest(&self) -> Result<(), CheckpointError> {
        let path = self.scratch.join(MANIFEST);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(CheckpointError::Io { action: "remove", path, source: error })
            }
            _ => Ok(()),
        }
    }

    /// Returns the file that the note of `rank` describes, and removes the note; `None` if there is no note.
    ///
    /// # Errors
    /// When the path leads to another folder by now, the note cannot be read, or a parameter of that rank is
    /// not finite.
    pub fn take_note(&self, rank: WorldRank) -> Result<Option<StateFile>, CheckpointError> {
        self.folder.require()?;
        let path = self.scratch.join(note_of(rank));
        let text = match read_regular(&path, SMALL_TEXT) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::io("read", &path)(source)),
        };
        let note = serde_json::from_slice(&text).map_err(std::io::Error::from);
        let note = note.map_err(CheckpointError::io("understand", &path))?;
        fs::remove_file(&path).map_err(CheckpointError::io("remove", &path))?;
        match note {
            Note::File(file) => Ok(Some(file)),
            Note::Refused { parameter, found } => Err(self.not_finite(&parameter, found)),
        }
    }

    fn not_finite(&self, parameter: &str, found: NotFinite) -> CheckpointError {
        let path = self.folder.path().to_owned();
        CheckpointError::NotFinite { path, step: self.step, parameter: parameter.into(), found }
    }

    /// Gives the checkpoint its final name, and returns its path. All files of the manifest must have been
    /// written, and the manifest's step must be the step that was passed to [`Saving::begin`].
    ///
    /// # Errors
    /// When the path leads to another folder by now, or the system reports an error.
    pub fn commit(mut self, manifest: &Manifest) -> Result<PathBuf, CheckpointError> {
        self.folder.require()?;
        let path = self.scratch.join(MANIFEST);
        let written = File::create_new(&path).and_then(|mut file| {
            file.write_all(manifest.to_text().as_bytes())?;
            file.sync_all()
        });
        written.map_err(CheckpointError::io("write", &path)).map_err(|error| self.folder.explain(error))?;
        sync_folder(&self.scratch)?;
        // The checkpoint is complete except for its name, so this process must not remove it any more.
        self.owns_scratch = false;
        publish(&self.scratch, &self.folder, self.step).map_err(|error| self.folder.explain(error))?;
        Ok(self.folder.path().join(committed_name(self.step)))
    }
}

/// The message of a process to the one that commits.
#[derive(Debug, Serialize, Deserialize)]
enum Note {
    /// The rank's file is on disk.
    File(StateFile),
    /// A parameter of the rank is not finite, so the checkpoint must not be committed.
    Refused { parameter: String, found: NotFinite },
}

impl Drop for Saving {
    fn drop(&mut self) {
        if self.owns_scratch && self.folder.require().is_ok() {
            // Best effort: the next owner of the folder removes the remaining files.
            let _ = fs::remove_dir_all(&self.scratch);
        }
    }
}

/// Checks that every parameter in these parts of one checkpoint has a path of its own. The parts have one
/// copy of a parameter that several stages share.
pub(super) fn check_paths(ranks: &[RankState]) -> Result<(), CheckpointError> {
    let mut known = HashSet::new();
    for stage in ranks.iter().flat_map(|rank| &rank.stages) {
        for HeldParameter { path, shard, rows, .. } in &stage.parameters {
            // Each tensor rank has its own shard, and each sharded replica its own part.
            if !known.insert((path, shard.index, rows.index)) {
                return Err(CheckpointError::Refused(format!(
                    "two parameters have the path `{path}`, and a checkpoint holds one of each path: give different \
                     parameters different paths (`StageModule::parameter_path`, or `Stage::with_prefix`)"
                )));
            }
        }
    }
    Ok(())
}

/// The names of the parameters in a file: their paths. Shards of one parameter have the path with their
/// index.
pub(super) struct Names {
    /// The parameters that have several shards in the file.
    several: HashSet<Arc<str>>,
}

impl Names {
    /// Returns names that have the index of the shard unless a parameter is whole.
    pub(super) fn with_indices(stage: &StageState) -> Self {
        let held = stage.parameters.iter().filter(|held| !held.shard.is_whole());
        Self { several: held.map(|held| held.path.clone()).collect() }
    }

    fn of(stages: &[StageState]) -> Self {
        let mut known = HashSet::new();
        let held = stages.iter().flat_map(|stage| &stage.parameters);
        let again = held.filter(|held| !known.insert(&held.path)).map(|held| held.path.clone());
        Self { several: again.collect() }
    }

    fn of_parameter(&self, held: &HeldParameter) -> Arc<str> {
        if self.several.contains(&held.path) {
            format!("{}{INDEX}{}", held.path, held.shard.index).into()
        } else {
            held.path.clone()
        }
    }

    /// Returns the path of the parameter with this name.
    fn path_of<'a>(&self, name: &'a str) -> &'a str {
        let path = name.rsplit_once(INDEX).map_or(name, |(path, _)| path);
        if self.several.contains(path) { path } else { name }
    }

    /// Returns the rows of parameters that are sharded over other replicas than most parameters are, by name.
    fn rows(&self, stages: &[StageState]) -> BTreeMap<String, RowShard> {
        let held =
            stages.iter().flat_map(|stage| stage.parameters.iter().map(|held| (held, stage.row_shard)));
        let others = held.filter_map(|(held, part)| Some((held, held.other_rows(part)?)));
        others.map(|(held, rows)| (self.of_parameter(held).to_string(), rows)).collect()
    }

    /// Returns the shards of the parameters that these stages do not have whole, by name.
    fn shards(&self, stages: &[StageState]) -> BTreeMap<String, StoredShard> {
        let held = stages.iter().flat_map(|stage| &stage.parameters).filter(|held| !held.shard.is_whole());
        held.map(|held| (self.of_parameter(held).to_string(), held.stored_shard())).collect()
    }
}

/// Adds a stage's tensors under their names.
pub(super) fn add_stage(
    stage: StageState,
    names: &Names,
    tensors: &mut BTreeMap<String, Named>,
    texts: &mut BTreeMap<String, String>,
) -> Result<(), CheckpointError> {
    let StageState { parameters, optimizer, row_shard } = stage;
    if let Some(parameter) = parameters.iter().find(|parameter| parameter.path.contains(FIELD)) {
        return Err(CheckpointError::Refused(format!(
            "the parameter `{}` has an @ in its path, which separates optimizer state: give it another path",
            parameter.path
        )));
    }
    let paths = parameters.iter().map(|parameter| (parameter.id, names.of_parameter(parameter))).collect();
    if let Some(optimizer) = optimizer {
        let parts = take_apart(&optimizer, &paths)?;
        texts.extend(parts.scalars);
        tensors.extend(parts.tensors.into_iter().map(|(name, data)| {
            let (content, accepted) = (Content::Data(data), Accepted::Any);
            (name.clone(), Named { name, content, accepted })
        }));
    }
    // A replica has no rows of a parameter that has fewer rows than there are row shards.
    let is_there = |parameter: &HeldParameter| row_shard.is_none() || parameter.value.shape()[0] > 0;
    for mut parameter in parameters.into_iter().filter(is_there) {
        let name = names.of_parameter(&parameter).to_string();
        if let Some(older) = parameter.older.take() {
            let (name, content) = (format!("{name}{FIELD}{OLDER}"), Content::Live(Box::new(older)));
            tensors.insert(name.clone(), Named { name, content, accepted: Accepted::Finite });
        }
        let content = match parameter.value.kind() {
            // Devices store booleans in different ways; a file stores them in one.
            ValueKind::Bool => {
                Content::Data(parameter.value.into_data().convert_dtype(DType::Bool(BoolStore::Native)))
            }
            _ => Content::Live(Box::new(parameter.value)),
        };
        let accepted = if parameter.is_trained { Accepted::Finite } else { Accepted::Infinite };
        tensors.insert(name.clone(), Named { name, content, accepted });
    }
    Ok(())
}
