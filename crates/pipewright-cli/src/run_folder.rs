//! The folder of a run's results: `metrics.jsonl`, `config.toml`, `timeline.json`, the timelines of further steps, and
//! its checkpoints.
//!
//! Files of an earlier run are never overwritten. `train` renames the folder of an earlier run: it appends `.1`, `.2`
//! and so on to the name. `resume` from a checkpoint before the run's last step moves the later lines of the metrics to
//! `metrics.1.jsonl`, the later checkpoints to `checkpoints.1` and the later timelines to `timelines.1`. If the folder
//! contains files of the same names that do not belong to a run, the run is refused. The folder of the checkpoints is
//! locked during a run, so two runs never write to the same folder. If the path leads to another folder during the run, for
//! example because a user moved the folder, nothing more is written, and the folder is never created again.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{
    create_regular, read_regular, read_regular_text, refuse_special, write_regular,
};
use pipewright::checkpoint::{CheckpointError, CheckpointFolder, FolderIdentity};
use pipewright::ids::StepNumber;
pub(crate) use pipewright::train::{
    CONFIG_FILE as CONFIG, METRICS_FILE as METRICS, TIMELINE_FILE as TIMELINE,
};
use pipewright::train::{Metrics, TIMELINES_FOLDER, timeline_name};
use thiserror::Error;

/// The folder of the checkpoints.
const CHECKPOINTS: &str = "checkpoints";
/// The page that `pipewright view` makes of a run.
pub(crate) const VIEW: &str = "view.html";
/// The page that `pipewright report` makes of a run.
pub(crate) const REPORT: &str = "report.html";
/// The most bytes of a file in a run's folder that are read: the metrics of some million steps.
pub(crate) const LARGEST: u64 = 2 << 30;

/// A run's folder, ready to be written to.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    metrics: File,
    /// One sentence for each file or folder that was moved aside.
    moved: Vec<String>,
    /// The folder of the checkpoints, until the writer of checkpoints takes it.
    checkpoints: Option<CheckpointFolder>,
    /// The folder of the checkpoints, to recognise this run's folder before each write.
    identity: FolderIdentity,
}

/// The reason why results cannot be written.
#[derive(Debug, Error)]
pub(crate) enum RunFolderError {
    /// The folder or a file in it cannot be written.
    #[error("{}: cannot be written: {source}; choose another run.out", path.display())]
    Write {
        /// The folder or file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The path is not a folder.
    #[error("{}: not a folder; choose another run.out", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// A file that the run would write exists and does not belong to a run.
    #[error(
        "{}: the file does not belong to an earlier run and would be overwritten; choose another run.out",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The folder does not contain a run to resume.
    #[error("{}: there is no run to resume in this folder: {CONFIG} is missing; train first", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// The folder of the checkpoints cannot be locked or read.
    #[error(transparent)]
    Checkpoints(#[from] CheckpointError),
    /// The earlier run, or a part of it, cannot be moved.
    #[error("{}: cannot be moved aside: {source}; move it by hand, or choose another run.out", path.display())]
    MoveAside {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

impl RunFolderError {
    /// Returns whether the run's folder was moved, removed or replaced during the run.
    pub(crate) fn is_lost_folder(&self) -> bool {
        matches!(self, Self::Checkpoints(error) if is_lost_folder(error))
    }

    /// Returns the message without the advice to choose another folder, for a run that goes on.
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::Write { path, source } => format!("{}: {source}", path.display()),
            other => other.to_string(),
        }
    }
}

/// Returns whether a run's folder was moved, removed or replaced during the run.
pub(crate) fn is_lost_folder(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::FolderGone { .. } | CheckpointError::FolderReplaced { .. })
}

/// Checks that a run could be written to `path` with these `files`, and leaves the file system unchanged.
///
/// # Errors
/// Fails if [`RunFolder::create`] would fail.
pub(crate) fn probe(path: &Path, files: &[(String, String)]) -> Result<(), RunFolderError> {
    refuse_foreign_files(path, files)?;
    // The run's folder, or its first missing ancestor, would be created in the nearest folder that exists.
    let existing = path.ancestors().find(|folder| fs::symlink_metadata(folder).is_ok());
    let Some(existing) = existing else { return Ok(()) };
    if !existing.is_dir() {
        return Err(RunFolderError::NotAFolder { path: existing.to_owned() });
    }
    let trial = existing.join(format!(".pipewright-{}", std::process::id()));
    let tried = File::create_new(&trial).and_then(|_| fs::remove_file(&trial));
    tried.map_err(|source| RunFolderError::Write { path: path.to_owned(), source })
}

impl RunFolder {
    /// Creates the folder, moves an earlier run aside, and writes `config`, the effective configuration, and before it
    /// `files`, each with its name and text.
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
        let checkpoints = own_checkpoints(path)?;
        let metrics_path = path.join(METRICS);
        let metrics = File::create_new(&metrics_path).map_err(write_error(&metrics_path))?;
        for (name, text) in files {
            let file = path.join(name);
            write_regular(&file, text.as_bytes()).map_err(write_error(&file))?;
        }
        write_config(path, config)?;
        let identity = checkpoints.identity().clone();
        Ok(Self { path: path.to_owned(), metrics, moved, checkpoints: Some(checkpoints), identity })
    }

    /// Resumes the run in the folder after step `done`: moves aside the checkpoints and the metrics of later steps, and
    /// replaces the run's configuration with `config`.
    ///
    /// # Errors
    /// Fails if the folder cannot be written.
    pub(crate) fn reopen(
        path: &Path,
        config: &str,
        done: u64,
        checkpoints: CheckpointFolder,
    ) -> Result<Self, RunFolderError> {
        let identity = checkpoints.identity().clone();
        identity.require()?;
        // Checkpoints are moved first: if this process is killed in between, the run can still be resumed.
        let mut moved: Vec<String> = move_later_checkpoints(path, done)?.into_iter().collect();
        keep_last_timeline(path)?;
        moved.extend(move_later_timelines(path, done)?);
        let (metrics, cut) = cut_metrics(path, done)?;
        moved.extend(cut);
        write_config(path, config)?;
        Ok(Self { path: path.to_owned(), metrics, moved, checkpoints: Some(checkpoints), identity })
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

    /// Returns one sentence for each file or folder that was moved aside.
    pub(crate) fn moved(&self) -> &[String] {
        &self.moved
    }

    /// Appends a step's metrics as one line, which other programs can read immediately.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn write_metrics(&mut self, metrics: &Metrics) -> Result<(), RunFolderError> {
        self.require()?;
        let mut line = serde_json::to_string(metrics).expect("figures can be written as JSON");
        line.push('\n');
        let written = self.metrics.write_all(line.as_bytes()).and_then(|()| self.metrics.flush());
        written.map_err(write_error(&self.path.join(METRICS)))
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

    /// Writes a file of this folder. After a failure there is no part of it.
    fn write(&self, path: &Path, text: &str) -> Result<(), RunFolderError> {
        self.require()?;
        refuse_special(path).map_err(write_error(path))?;
        // A reader of the run, such as a report that follows it, never finds a part of the file.
        let mut draft = path.as_os_str().to_owned();
        draft.push(".draft");
        let draft = PathBuf::from(draft);
        write_regular(&draft, text.as_bytes()).and_then(|()| fs::rename(&draft, path)).map_err(|error| {
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

/// Creates a folder inside a run's folder, unless it exists. The run's folder itself is never created here.
fn create_in_run(folder: &Path) -> Result<(), RunFolderError> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(write_error(folder)(error)),
        _ => Ok(()),
    }
}

/// Returns the folder of the timelines of a run's steps.
fn timelines_of(run: &Path) -> PathBuf {
    run.join(TIMELINES_FOLDER)
}

/// Returns the steps of a run whose timelines are kept, each with its file, in their order. No folder means no steps.
///
/// # Errors
/// Fails if the folder cannot be read.
pub(crate) fn kept_timelines(run: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(timelines_of(run)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut kept = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let step = name.and_then(|name| name.strip_prefix("step-")?.strip_suffix(".json")?.parse().ok());
        kept.extend(step.map(|step| (step, path)));
    }
    kept.sort_unstable();
    Ok(kept)
}

/// Returns the path of the configuration of the run in a folder.
///
/// # Errors
/// Fails if there is no configuration.
pub(crate) fn config_of(run: &Path) -> Result<PathBuf, RunFolderError> {
    let config = run.join(CONFIG);
    if config.is_file() { Ok(config) } else { Err(RunFolderError::NoRun { path: run.to_owned() }) }
}

/// Returns the folder of the checkpoints of the run in a folder.
pub(crate) fn checkpoints_of(run: &Path) -> PathBuf {
    run.join(CHECKPOINTS)
}

/// Locks a run's folder for this process.
///
/// # Errors
/// Fails if another process has locked it, or if the system refuses.
pub(crate) fn own_checkpoints(run: &Path) -> Result<CheckpointFolder, RunFolderError> {
    Ok(CheckpointFolder::own(&checkpoints_of(run))?)
}

/// Returns the length of the metrics up to and including the line of step `done`. The metrics end before the first line
/// that is incomplete or belongs to a later step.
pub(crate) fn lines_to(metrics: &str, done: u64) -> usize {
    let is_kept = |line: &str| {
        let figures = serde_json::from_str::<serde_json::Value>(line).ok();
        let step = figures.and_then(|figures| figures.get("step")?.as_u64());
        line.ends_with('\n') && step.is_some_and(|step| step <= done)
    };
    metrics.split_inclusive('\n').take_while(|line| is_kept(line)).map(str::len).sum()
}

/// Replaces the configuration atomically: if the process is killed, either the previous or the given one remains.
fn write_config(run: &Path, config: &str) -> Result<(), RunFolderError> {
    let (path, scratch) = (run.join(CONFIG), run.join(format!(".{CONFIG}")));
    let written = create_regular(&scratch).and_then(|mut file| {
        file.write_all(config.as_bytes())?;
        file.sync_all()?;
        fs::rename(&scratch, &path)
    });
    written.map_err(write_error(&path))
}

/// Returns a function for `map_err` that adds the path to a failed write.
fn write_error(path: &Path) -> impl FnOnce(io::Error) -> RunFolderError {
    move |source| RunFolderError::Write { path: path.to_owned(), source }
}

/// Returns whether the folder contains a run: its metrics, or checkpoints if the metrics were deleted.
fn is_run(path: &Path) -> bool {
    path.join(METRICS).exists() || checkpoints_of(path).exists()
}

/// Refuses a folder without a run if a file in it would be overwritten. One of `files` may be there with the same text.
fn refuse_foreign_files(path: &Path, files: &[(String, String)]) -> Result<(), RunFolderError> {
    let is_other = |file: &Path, text: &str| match read_regular(file, LARGEST) {
        Ok(found) => found != text.as_bytes(),
        Err(_) => file.exists(),
    };
    let own = [CONFIG, TIMELINE].map(|name| path.join(name)).into_iter().find(|file| file.exists());
    let foreign = own.or_else(|| {
        let mut files = files.iter().map(|(name, text)| (path.join(name), text));
        files.find(|(file, text)| is_other(file, text)).map(|(file, _)| file)
    });
    match foreign {
        Some(file) if !is_run(path) => Err(RunFolderError::Foreign { path: file }),
        _ => Ok(()),
    }
}

/// Renames the folder of a run to a free name. Fails if a run is still writing to it.
fn move_run_aside(path: &Path) -> Result<PathBuf, RunFolderError> {
    drop(own_checkpoints(path)?);
    let aside = free_name(path, "");
    fs::rename(path, &aside).map_err(move_error(path))?;
    Ok(aside)
}

/// Moves the checkpoints of steps after `done` to a separate folder, and returns a sentence that says so. Otherwise
/// they would count as the newest checkpoints of the run.
fn move_later_checkpoints(run: &Path, done: u64) -> Result<Option<String>, RunFolderError> {
    let folder = checkpoints_of(run);
    let later: Vec<(u64, PathBuf)> =
        CheckpointFolder::list(&folder)?.into_iter().filter(|(step, _)| *step > done).collect();
    if later.is_empty() {
        return Ok(None);
    }
    let aside = free_name(&folder, "");
    fs::create_dir(&aside).map_err(write_error(&aside))?;
    for (_, checkpoint) in later.iter().rev() {
        let name = checkpoint.file_name().unwrap_or_default();
        fs::rename(checkpoint, aside.join(name)).map_err(move_error(checkpoint))?;
    }
    let count = later.len();
    Ok(Some(format!("moved {count} checkpoint(s) of steps after {done} to {}", aside.display())))
}

/// Moves the timeline of the last step to those of further steps. While the run continues, the last line of the metrics
/// is of another step than this timeline.
fn keep_last_timeline(run: &Path) -> Result<(), RunFolderError> {
    let (last, folder) = (run.join(TIMELINE), timelines_of(run));
    let metrics = read_regular_text(&run.join(METRICS), LARGEST).unwrap_or_default();
    let step_of = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?.get("step")?.as_u64();
    let Some(step) = metrics.lines().rev().find_map(step_of).filter(|_| last.is_file()) else {
        return Ok(());
    };
    create_in_run(&folder)?;
    fs::rename(&last, folder.join(timeline_name(step))).map_err(move_error(&last))
}

/// Moves the timelines of steps after `done` to a separate folder, and returns a sentence that says so.
fn move_later_timelines(run: &Path, done: u64) -> Result<Option<String>, RunFolderError> {
    let folder = timelines_of(run);
    let kept = kept_timelines(run).map_err(write_error(&folder))?;
    let later: Vec<PathBuf> =
        kept.into_iter().filter(|(step, _)| *step > done).map(|(_, path)| path).collect();
    if later.is_empty() {
        return Ok(None);
    }
    let aside = free_name(&folder, "");
    fs::create_dir(&aside).map_err(write_error(&aside))?;
    for timeline in &later {
        fs::rename(timeline, aside.join(timeline.file_name().unwrap_or_default()))
            .map_err(move_error(timeline))?;
    }
    Ok(Some(format!("moved {} timeline(s) of steps after {done} to {}", later.len(), aside.display())))
}

/// Opens the metrics for appending after the line of step `done`. Later lines are copied to a separate file before they
/// are cut off. The returned sentence names that file.
fn cut_metrics(run: &Path, done: u64) -> Result<(File, Option<String>), RunFolderError> {
    let path = run.join(METRICS);
    let bytes = match read_regular(&path, LARGEST) {
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        read => read.map_err(write_error(&path))?,
    };
    // Only an incomplete last line can contain an incomplete character, and that line is not kept.
    let kept = lines_to(&String::from_utf8_lossy(&bytes), done);
    let mut sentence = None;
    if kept < bytes.len() {
        let aside = free_name(&run.join("metrics"), ".jsonl");
        let written = File::create_new(&aside).and_then(|mut file| {
            file.write_all(&bytes[kept..])?;
            file.sync_all()
        });
        written.map_err(write_error(&aside))?;
        sentence = Some(format!("moved the metrics of steps after {done} to {}", aside.display()));
    }
    let opened = File::options().append(true).create(true).open(&path).and_then(|metrics| {
        metrics.set_len(kept as u64)?;
        Ok(metrics)
    });
    Ok((opened.map_err(write_error(&path))?, sentence))
}

/// Returns the first free name of `PATH.1ENDING`, `PATH.2ENDING` and so on.
fn free_name(path: &Path, ending: &str) -> PathBuf {
    let numbered = |number: u64| {
        let mut name = OsString::from(path);
        name.push(format!(".{number}{ending}"));
        PathBuf::from(name)
    };
    let free = (1..).map(numbered).find(|name| fs::symlink_metadata(name).is_err());
    free.expect("a folder has fewer entries than there are numbers")
}

/// Returns a function for `map_err` that adds the path to a failed move.
fn move_error(path: &Path) -> impl FnOnce(io::Error) -> RunFolderError {
    move |source| RunFolderError::MoveAside { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
