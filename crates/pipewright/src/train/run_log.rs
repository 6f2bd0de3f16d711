//! [`RunLog`]: the folder of a run of your own, which `pipewright report` and `pipewright view` read.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use pipewright_schedule::Timeline;
use pipewright_system::bounded_file::{open_regular_with, read_regular, write_fresh, write_regular};
use pipewright_system::lock_file::LockFile;
use serde_json::Value as Json;

use crate::pipeline::StepSummary;
use crate::train::metrics::{Metrics, TOKENS};
use crate::train::tensorboard::{EventFile, EventFileError};

/// The most bytes of the metrics that are read, enough for some million steps.
const LARGEST_METRICS: u64 = 2 << 30;

/// What a run counts if it does not say.
const UNIT: &str = "samples";

/// The file of a run's folder that has one line of metrics per step.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// The file of a run's folder that has its settings.
pub const CONFIG_FILE: &str = "config.toml";
/// The file of a run's folder that has the timeline of the last step.
pub const TIMELINE_FILE: &str = "timeline.json";
/// The folder of the timelines of further steps, in a run's folder.
pub const TIMELINES_FOLDER: &str = "timelines";

/// Returns the name of the file with the timeline of a step, in [`TIMELINES_FOLDER`]. Names sort by step.
pub fn timeline_name(step: u64) -> String {
    format!("step-{step:08}.json")
}

/// Writes the results of a run into a folder: the metrics of each step, timelines, and event files for
/// TensorBoard.
///
/// With several processes, only the first one writes a log. Checkpoints may be in the same folder, under
/// `checkpoints`.
///
/// ```
/// use pipewright::pipeline::{Pipeline, PipelineError};
/// use pipewright::prelude::*;
///
/// fn train(pipeline: &mut Pipeline, x: Tensor<2>, y: Tensor<2>) -> Result<(), Box<dyn std::error::Error>> {
///     let mut log = RunLog::open("runs/mine", 0)?.with_tensorboard()?;
///     for _ in 0..100 {
///         let (rate, rows) = (1e-3, x.dims()[0]);
///         let summary = pipeline.step(x.clone(), y.clone(), rate)?;
///         let metrics = log.metrics(&summary, rate, rows as u64);
///         log.step(&metrics, &summary)?;
///     }
///     log.finish()?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct RunLog {
    folder: PathBuf,
    metrics: LockFile,
    /// The number of steps in the metrics.
    done: u64,
    /// What the steps count, in the plural.
    unit: String,
    /// The tokens and the seconds of these steps.
    tokens: u64,
    elapsed_s: f64,
    began: Instant,
    events: Option<EventFile>,
    last: Option<Timeline>,
}

/// Why a run's results cannot be written.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RunLogError {
    /// The folder has the results of an earlier run.
    #[error(
        "{}: the folder has the results of a run: choose another folder, or continue that run after its checkpoint",
        path.display()
    )]
    HasRun {
        /// The file of the earlier results.
        path: PathBuf,
    },
    /// Another process writes to the folder.
    #[error("{}: another process writes to this folder: wait until it has ended, or choose another folder", path.display())]
    InUse {
        /// The file that the other process writes.
        path: PathBuf,
    },
    /// The file was moved or deleted while the run was under way.
    #[error("{}: the file was moved or deleted during the run: its results are no longer written", path.display())]
    Gone {
        /// The file.
        path: PathBuf,
    },
    /// A file or a folder cannot be read or written.
    #[error("{}: cannot be {action}: {source}", path.display())]
    Io {
        /// The action that failed, as in "cannot be written".
        action: &'static str,
        /// The file or the folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The event file cannot be written.
    #[error(transparent)]
    Events(#[from] EventFileError),
}

pipewright_schedule::message_as_debug!(RunLogError);

impl RunLog {
    /// Opens the folder of a run whose first `done` steps are finished, and creates it for a run that starts.
    /// Lines of later steps, which the run takes again, are moved to `metrics.1.jsonl`, or the next free
    /// number.
    ///
    /// # Errors
    /// When a run that starts finds the results of another one, another process writes to the folder, or the
    /// folder cannot be written.
    pub fn open(folder: impl AsRef<Path>, done: u64) -> Result<Self, RunLogError> {
        let folder = folder.as_ref().to_owned();
        let path = folder.join(METRICS_FILE);
        if done == 0 && path.exists() {
            return Err(RunLogError::HasRun { path });
        }
        fs::create_dir_all(&folder).map_err(failed("created", &folder))?;
        let opened = open_regular_with(&path, File::options().append(true).create(true));
        let metrics = opened.map_err(failed("opened", &path))?;
        let metrics = match LockFile::lock(metrics) {
            Ok(metrics) => metrics,
            Err((_, fs::TryLockError::WouldBlock)) => return Err(RunLogError::InUse { path }),
            Err((_, fs::TryLockError::Error(source))) => return Err(failed("locked", &path)(source)),
        };
        let last = keep_lines(&path, &metrics, done)?;
        let figure = |name| last.as_ref().and_then(|line| line.get(name));
        // Lines about text have no unit.
        let default_unit = if last.is_some() { TOKENS } else { UNIT };
        Ok(Self {
            done,
            unit: figure("unit").and_then(Json::as_str).unwrap_or(default_unit).to_owned(),
            tokens: figure("tokens").and_then(Json::as_u64).unwrap_or_default(),
            elapsed_s: figure("elapsed_s").and_then(Json::as_f64).unwrap_or_default(),
            folder,
            metrics,
            began: Instant::now(),
            events: None,
            last: None,
        })
    }

    /// Sets what the run counts, in the plural: `tokens` for text, whose loss is in nats per token. Other names are
    /// shown as they are, and the loss has no unit. Default: `samples`.
    pub fn counting(self, unit: &str) -> Self {
        Self { unit: unit.to_owned(), ..self }
    }

    /// Also writes an event file for TensorBoard.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn with_tensorboard(self) -> Result<Self, RunLogError> {
        let events = EventFile::create(&self.folder, self.done)?;
        Ok(Self { events: Some(events), ..self })
    }

    /// Writes the settings of the run, which the page of `pipewright report` shows. Any text will do.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_config(&self, text: &str) -> Result<(), RunLogError> {
        let path = self.folder.join(CONFIG_FILE);
        write_regular(&path, text.as_bytes()).map_err(failed("written", &path))
    }

    /// Returns the metrics of a step. `count` is the number of samples of its batch, or of what else the run counts
    /// ([`RunLog::counting`]). The caller may change them, for example add the validation loss.
    pub fn metrics(&self, summary: &StepSummary, learning_rate: f64, count: u64) -> Metrics {
        let mut metrics = Metrics {
            tokens: self.tokens + count,
            elapsed_s: self.elapsed_s + self.began.elapsed().as_secs_f64(),
            ..Metrics::of(summary, learning_rate, count)
        };
        metrics.set_counted(&self.unit);
        metrics
    }

    /// Appends the metrics of a step, which other programs can read immediately, and keeps its timeline for
    /// [`RunLog::finish`].
    ///
    /// # Errors
    /// When the file was moved or deleted, or cannot be written.
    pub fn step(&mut self, metrics: &Metrics, summary: &StepSummary) -> Result<(), RunLogError> {
        self.require_folder()?;
        let path = self.folder.join(METRICS_FILE);
        let mut line =
            serde_json::to_string(metrics).map_err(|error| failed("written", &path)(error.into()))?;
        line.push('\n');
        let written = self.metrics.write_all(line.as_bytes()).and_then(|()| self.metrics.flush());
        written.map_err(failed("written", &path))?;
        if let Some(events) = &mut self.events {
            events.step(metrics)?;
        }
        (self.done, self.tokens) = (metrics.step, metrics.tokens);
        self.last = Some(summary.timeline.clone());
        Ok(())
    }

    /// Writes the timeline of a step next to the timelines of other steps, which `pipewright view` shows
    /// together.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn keep_timeline(&self, summary: &StepSummary) -> Result<(), RunLogError> {
        self.require_folder()?;
        let folder = self.folder.join(TIMELINES_FOLDER);
        match fs::create_dir(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("created", &folder)(error));
            }
            _ => {}
        }
        let path = folder.join(timeline_name(summary.step.get()));
        write_regular(&path, summary.timeline.chrome_trace().as_bytes()).map_err(failed("written", &path))
    }

    /// Writes the timeline of the last step.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn finish(self) -> Result<(), RunLogError> {
        let Some(timeline) = &self.last else { return Ok(()) };
        self.require_folder()?;
        let path = self.folder.join(TIMELINE_FILE);
        write_regular(&path, timeline.chrome_trace().as_bytes()).map_err(failed("written", &path))
    }

    /// Checks that the path still leads to the folder of this run.
    fn require_folder(&self) -> Result<(), RunLogError> {
        let path = self.folder.join(METRICS_FILE);
        if is_at(&self.metrics, &path) { Ok(()) } else { Err(RunLogError::Gone { path }) }
    }

    /// Returns the path of the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Cuts the metrics after the line of step `done`, and moves later lines to another file. Returns the last
/// line that stays.
fn keep_lines(path: &Path, file: &File, done: u64) -> Result<Option<Json>, RunLogError> {
    let text = read_regular(path, LARGEST_METRICS).map_err(failed("read", path))?;
    let (mut kept, mut last) = (0, None);
    // A run that was killed may have left a line that ends in the middle, even of a character.
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let figures = serde_json::from_slice::<Json>(line).ok().filter(|_| line.ends_with(b"\n"));
        let step = figures.as_ref().and_then(|figures| figures.get("step")?.as_u64());
        if step.is_none_or(|step| step > done) {
            break;
        }
        (kept, last) = (kept + line.len(), figures);
    }
    if kept < text.len() {
        let numbers = (1..).map(|number: u32| path.with_file_name(format!("metrics.{number}.jsonl")));
        let aside = numbers.into_iter().find(|path| !path.exists()).unwrap_or_default();
        write_fresh(&aside, &text[kept..]).map_err(failed("written", &aside))?;
        file.set_len(kept as u64).map_err(failed("written", path))?;
    }
    Ok(last)
}

/// Returns whether the open file is still the one at this path.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(found)) => identity(open) == identity(found),
        _ => false,
    }
}

/// Returns whether a file is still at this path.
#[cfg(not(unix))]
fn is_at(_file: &File, path: &Path) -> bool {
    path.is_file()
}

/// Returns a function for `map_err` that adds the action and the path to the system's reason.
fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RunLogError {
    move |source| RunLogError::Io { action, path: path.to_owned(), source }
}
