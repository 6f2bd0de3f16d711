//! [`RunFolder`]: a run's folder that this process writes to.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pipewright::bounded_file::{
    create_fresh, open_regular_with, read_regular, refuse_special, write_fresh, write_regular,
};
use pipewright::checkpoint::{CheckpointFolder, FolderIdentity};
use pipewright::ids::StepNumber;
use pipewright::train::{Metrics, timeline_name};
use pipewright_system::lock_file::LockFile;
use serde::Serialize;

use crate::run_folder::aside::{
    CutMetrics, create_in_run, cut_fingerprints, cut_metrics, keep_last_timeline, move_later_checkpoints,
    move_later_timelines, move_run_aside,
};
use crate::run_folder::contents::foreign_paths;
use crate::run_folder::error::{RunFolderError, listed, refused, write_error};
use crate::run_folder::lock::RunLock;
use crate::run_folder::metrics_lines::{self, with_evaluation};
use crate::run_folder::paths::{
    CONFIG, FINGERPRINTS, LARGEST, METRICS, OVERVIEW, TIMELINE, is_run, timelines_of,
};

/// A run's folder, ready to be written to.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    metrics: LockFile,
    /// One sentence for each file or folder that was moved aside.
    moved: Vec<String>,
    /// A warning, if lines of the metrics were lost before the run resumed.
    lost: Option<String>,
    /// The time that the run had taken before it resumed.
    earlier: Duration,
    /// The folder of the checkpoints, until the writer of checkpoints takes it.
    checkpoints: Option<CheckpointFolder>,
    /// The folder of the checkpoints, to recognise this run's folder before each write.
    identity: FolderIdentity,
}

impl RunFolder {
    /// Creates the folder, moves an earlier run aside, and writes `config`, the effective configuration, and
    /// before it `files`, each with its name and text.
    ///
    /// # Errors
    /// Fails if the folder cannot be written, contains files that a run would overwrite, or cannot be moved.
    pub(crate) fn create(
        path: &Path,
        config: &str,
        files: &[(String, String)],
    ) -> Result<Self, RunFolderError> {
        refuse_foreign_files(path, files)?;
        let mut moved = Vec::new();
        if is_run(path) {
            moved.push(format!("moved the earlier run to {}", move_run_aside(path)?.display()));
        }
        fs::create_dir_all(path).map_err(write_error(path))?;
        let (checkpoints, metrics) = RunLock::take(path)?.into_parts(path)?;
        for (name, text) in files {
            let file = path.join(name);
            write_regular(&file, text.as_bytes()).map_err(write_error(&file))?;
        }
        write_config(path, config)?;
        let identity = checkpoints.identity().clone();
        let (path, lost, earlier) = (path.to_owned(), None, Duration::ZERO);
        let checkpoints = Some(checkpoints);
        Ok(Self { path, metrics, moved, lost, earlier, checkpoints, identity })
    }

    /// Resumes the run in the folder after step `done`: moves aside the checkpoints, the metrics and the fingerprints of later
    /// steps, and replaces the run's configuration with `config`.
    ///
    /// # Errors
    /// Fails if the folder cannot be written.
    pub(crate) fn reopen(
        path: &Path,
        config: &str,
        done: u64,
        lock: RunLock,
    ) -> Result<Self, RunFolderError> {
        let identity = lock.checkpoints().identity().clone();
        identity.require()?;
        // Checkpoints are moved first: if this process is killed in between, the run can still be resumed.
        let mut moved: Vec<String> = move_later_checkpoints(path, done)?.into_iter().collect();
        keep_last_timeline(path)?;
        moved.extend(move_later_timelines(path, done)?);
        let (checkpoints, metrics) = lock.into_parts(path)?;
        let CutMetrics { metrics, moved: cut, lost, earlier } = cut_metrics(path, metrics, done)?;
        moved.extend(cut);
        moved.extend(cut_fingerprints(path, done)?);
        write_config(path, config)?;
        let (path, checkpoints) = (path.to_owned(), Some(checkpoints));
        Ok(Self { path, metrics, moved, lost, earlier, checkpoints, identity })
    }

    /// Takes the folder of the checkpoints. The second call panics.
    pub(crate) fn take_checkpoints(&mut self) -> CheckpointFolder {
        self.checkpoints.take().expect("one writer of checkpoints a run")
    }

    /// Checks that the run's folder is still at its path. Each write checks it too.
    ///
    /// # Errors
    /// Fails if the folder was moved or removed, or if another folder is at its path.
    pub(crate) fn require(&self) -> Result<(), RunFolderError> {
        Ok(self.identity.require()?)
    }

    /// Returns the time that the run had taken before it resumed, as its metrics say.
    pub(crate) fn earlier(&self) -> Duration {
        self.earlier
    }

    /// Returns a warning, if lines of the metrics were lost before the run resumed.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Returns one sentence for each file or folder that was moved aside.
    pub(crate) fn moved(&self) -> &[String] {
        &self.moved
    }

    /// Adds the results of an evaluation to the line of its step, unless the line has them.
    ///
    /// # Errors
    /// Fails if the metrics cannot be written.
    pub(crate) fn write_evaluation(&mut self, evaluated: &Metrics) -> Result<(), RunFolderError> {
        self.require()?;
        let text = String::from_utf8_lossy(&metrics_lines::read(&self.path)?).into_owned();
        if let Some(text) = with_evaluation(&text, evaluated) {
            self.metrics = metrics_lines::replace(&self.path, text.as_bytes())?;
        }
        Ok(())
    }

    /// Appends a line to the metrics, which other programs can read immediately: the metrics of a step, or an event.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn append(&mut self, content: &impl Serialize) -> Result<(), RunFolderError> {
        self.require()?;
        let written = self.metrics.write_all(line_of(content).as_bytes()).and_then(|()| self.metrics.flush());
        written.map_err(write_error(&self.path.join(METRICS)))
    }

    /// Appends a line to the fingerprints.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn append_fingerprint(&self, fingerprint: &impl Serialize) -> Result<(), RunFolderError> {
        self.require()?;
        let path = self.path.join(FINGERPRINTS);
        let opened = open_regular_with(&path, File::options().append(true).create(true));
        let written = opened.and_then(|mut file| file.write_all(line_of(fingerprint).as_bytes()));
        written.map_err(write_error(&path))
    }

    /// Writes the description of the run for `watch`.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn write_overview(&self, overview: &impl Serialize) -> Result<(), RunFolderError> {
        let text = serde_json::to_string(overview).expect("figures can be written as JSON");
        self.write(&self.path.join(OVERVIEW), &(text + "\n"))
    }

    /// Writes the last step's measured timeline.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn write_timeline(&self, trace: &str) -> Result<(), RunFolderError> {
        self.write(&self.path.join(TIMELINE), trace)
    }

    /// Writes the picture of a step that failed, and returns its path.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn write_failed_step(&self, step: StepNumber, page: &str) -> Result<PathBuf, RunFolderError> {
        let path = self.path.join(format!("failed-step-{step}.html"));
        self.write(&path, page)?;
        Ok(path)
    }

    /// Writes the measured timeline of a step, which stays when later steps are taken.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn keep_timeline(&self, step: u64, trace: &str) -> Result<(), RunFolderError> {
        self.require()?;
        let folder = timelines_of(&self.path);
        create_in_run(&folder)?;
        self.write(&folder.join(timeline_name(step)), trace)
    }

    /// Removes the timeline of a step.
    ///
    /// # Errors
    /// Fails if the file exists and cannot be removed.
    pub(crate) fn drop_timeline(&self, step: u64) -> Result<(), RunFolderError> {
        self.require()?;
        let path = timelines_of(&self.path).join(timeline_name(step));
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(write_error(&path)(error)),
            _ => Ok(()),
        }
    }

    /// Writes a file of this folder. If it fails, it leaves no part of the file.
    fn write(&self, path: &Path, text: &str) -> Result<(), RunFolderError> {
        self.require()?;
        refuse_special(path).map_err(write_error(path))?;
        // A reader of the run, such as a report that follows it, never finds a part of the file.
        let mut draft = path.as_os_str().to_owned();
        draft.push(".draft");
        let draft = PathBuf::from(draft);
        write_fresh(&draft, text.as_bytes()).and_then(|()| fs::rename(&draft, path)).map_err(|error| {
            // Best effort: the file may not exist.
            let _ = fs::remove_file(&draft);
            // The folder may be moved between the check and the write.
            self.require().err().unwrap_or_else(|| write_error(path)(error))
        })
    }

    /// Returns the path of the folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the text of a line, with its end.
fn line_of(content: &impl Serialize) -> String {
    serde_json::to_string(content).expect("figures can be written as JSON") + "\n"
}

/// Checks that a run could be written to `path` with these `files`, and leaves the file system unchanged.
///
/// # Errors
/// Fails if `RunFolder::create` would fail.
pub fn probe(path: &Path, files: &[(String, String)]) -> Result<(), RunFolderError> {
    refuse_foreign_files(path, files)?;
    // The run's folder, or its first missing ancestor, would be created in the nearest folder that exists.
    let existing = path.ancestors().find(|folder| fs::symlink_metadata(folder).is_ok());
    let Some(existing) = existing else { return Ok(()) };
    if !existing.is_dir() {
        return Err(refused(existing, "not a folder; choose another run.out"));
    }
    let trial = existing.join(format!(".pipewright-{}", std::process::id()));
    let tried = File::create_new(&trial).and_then(|_| fs::remove_file(&trial));
    tried.map_err(|source| RunFolderError::Write { path: path.to_owned(), source })
}

/// Refuses a folder with a run if it has files of the user, which would be moved aside with the run, and a folder
/// without a run if a file in it would be overwritten. One of `files` may be there with the same text.
fn refuse_foreign_files(path: &Path, files: &[(String, String)]) -> Result<(), RunFolderError> {
    if is_run(path) {
        let names = foreign_paths(path).map_err(write_error(path))?;
        return if names.is_empty() {
            Ok(())
        } else {
            let names = listed(&names);
            Err(refused(
                path,
                format!(
                    "the folder of the earlier run also has {names}, which no run has written, so the folder is not \
                     moved aside; move what is yours to another place, or choose another run.out"
                ),
            ))
        };
    }
    let is_other = |file: &Path, text: &str| match read_regular(file, LARGEST) {
        Ok(found) => found != text.as_bytes(),
        Err(_) => file.exists(),
    };
    let own =
        [CONFIG, FINGERPRINTS, TIMELINE].map(|name| path.join(name)).into_iter().find(|file| file.exists());
    let foreign = own.or_else(|| {
        let mut files = files.iter().map(|(name, text)| (path.join(name), text));
        files.find(|(file, text)| is_other(file, text)).map(|(file, _)| file)
    });
    let reason =
        "the file does not belong to an earlier run and would be overwritten; choose another run.out";
    foreign.map_or(Ok(()), |path| Err(refused(&path, reason)))
}

/// Replaces the configuration of a run that has ended, before it resumes, and writes `files`, each with its
/// name and text.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn replace_config(run: &Path, config: &str, files: &[(String, String)]) -> Result<(), RunFolderError> {
    for (name, text) in files {
        let file = run.join(name);
        write_fresh(&file, text.as_bytes()).map_err(write_error(&file))?;
    }
    write_config(run, config)
}

/// Replaces the configuration atomically: if the process is killed, either the previous or the given one
/// remains.
fn write_config(run: &Path, config: &str) -> Result<(), RunFolderError> {
    let (path, scratch) = (run.join(CONFIG), run.join(format!(".{CONFIG}")));
    let written = create_fresh(&scratch).and_then(|mut file| {
        file.write_all(config.as_bytes())?;
        file.sync_all()?;
        fs::rename(&scratch, &path)
    });
    written.map_err(write_error(&path))
}
