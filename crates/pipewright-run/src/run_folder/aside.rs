//! Moves an earlier run, or what it did after the step from which it resumes, to names that are free.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pipewright::bounded_file::open_regular_with;
use pipewright::checkpoint::CheckpointFolder;
use pipewright::train::timeline_name;
use pipewright_schedule::words::counted;
use pipewright_system::lock_file::LockFile;
use serde::Deserialize;

use crate::run_folder::error::{RunFolderError, move_error, write_error};
use crate::run_folder::lock::RunLock;
use crate::run_folder::metrics_lines::{self, Line, MetricsLines};
use crate::run_folder::paths::{
    FINGERPRINTS, LARGEST, METRICS, TIMELINE, checkpoints_of, kept_timelines, timelines_of,
};

/// Renames the folder of a run to a free name. Fails if a run is still writing to it.
pub(super) fn move_run_aside(path: &Path) -> Result<PathBuf, RunFolderError> {
    // The folder is locked until it has its other name.
    let _lock = RunLock::take(path)?;
    let aside = free_name(path, "");
    fs::rename(path, &aside).map_err(move_error(path))?;
    Ok(aside)
}

/// Moves the checkpoints of steps after `done` to a separate folder, and returns a sentence that says so.
/// Otherwise they would count as the newest checkpoints of the run.
pub(super) fn move_later_checkpoints(run: &Path, done: u64) -> Result<Option<String>, RunFolderError> {
    let folder = checkpoints_of(run);
    // The newest one first: if this process is killed in between, the run has no gap.
    let all = CheckpointFolder::list(&folder)?.into_iter().rev().collect();
    move_later(&folder, all, done, "checkpoint")
}

/// Moves the timelines of steps after `done` to a separate folder, and returns a sentence that says so.
pub(super) fn move_later_timelines(run: &Path, done: u64) -> Result<Option<String>, RunFolderError> {
    let folder = timelines_of(run);
    let kept = kept_timelines(run).map_err(write_error(&folder))?;
    move_later(&folder, kept, done, "timeline")
}

/// Moves the paths of a folder that are of steps after `done` to a folder next to it.
fn move_later(
    folder: &Path,
    paths: Vec<(u64, PathBuf)>,
    done: u64,
    what: &str,
) -> Result<Option<String>, RunFolderError> {
    let later: Vec<PathBuf> =
        paths.into_iter().filter(|(step, _)| *step > done).map(|(_, path)| path).collect();
    if later.is_empty() {
        return Ok(None);
    }
    let aside = free_name(folder, "");
    fs::create_dir(&aside).map_err(write_error(&aside))?;
    for path in &later {
        let name = path.file_name().unwrap_or_default();
        fs::rename(path, aside.join(name)).map_err(move_error(path))?;
    }
    let count = counted(later.len(), what);
    Ok(Some(format!("moved {count} of steps after {done} to {}", aside.display())))
}

/// Moves the timeline of the last step to the folder of the timelines of further steps. While the run
/// continues, the last line of the metrics is of another step than this timeline.
pub(super) fn keep_last_timeline(run: &Path) -> Result<(), RunFolderError> {
    let (last, folder) = (run.join(TIMELINE), timelines_of(run));
    let metrics = metrics_lines::read(run).unwrap_or_default();
    let mut lines = metrics.split_inclusive(|byte| *byte == b'\n').rev();
    let line = lines.find_map(Line::read).filter(|_| last.is_file());
    let Some(Line { step, .. }) = line else { return Ok(()) };
    create_in_run(&folder)?;
    fs::rename(&last, folder.join(timeline_name(step))).map_err(move_error(&last))
}

/// The metrics of a run that resumes, without the lines that do not stay.
pub(super) struct CutMetrics {
    /// The file, open for appending.
    pub(super) metrics: LockFile,
    /// A sentence about the lines that were moved aside.
    pub(super) moved: Option<String>,
    /// A warning about lines that were lost before.
    pub(super) lost: Option<String>,
    /// The time that the run has taken.
    pub(super) earlier: Duration,
}

/// Removes the lines of steps after `done` and broken lines from the metrics. They are copied to a separate file
/// before.
pub(super) fn cut_metrics(run: &Path, metrics: LockFile, done: u64) -> Result<CutMetrics, RunFolderError> {
    let (path, bytes) = (run.join(METRICS), metrics_lines::read(run)?);
    let lines = MetricsLines::of(&bytes, done);
    let cut = CutMetrics { metrics, moved: None, lost: lines.lost(&path), earlier: lines.elapsed };
    if lines.dropped.is_empty() {
        return Ok(cut);
    }
    let aside = free_name(&run.join("metrics"), ".jsonl");
    let written = File::create_new(&aside).and_then(|mut file| {
        file.write_all(&lines.dropped)?;
        file.sync_all()
    });
    written.map_err(write_error(&aside))?;
    let cut = CutMetrics { moved: lines.moved_to(done, &aside), ..cut };
    if bytes.starts_with(&lines.kept) {
        cut.metrics.set_len(lines.kept.len() as u64).map_err(write_error(&path))?;
        return Ok(cut);
    }
    Ok(CutMetrics { metrics: metrics_lines::replace(run, &lines.kept)?, ..cut })
}

/// Moves the fingerprints of steps after `done` to a separate file, and returns a sentence that says so. The steps ascend, so
/// the lines after them are moved too, and so are a broken line and those after it. The file may be larger than the memory:
/// one line is read at a time.
pub(super) fn cut_fingerprints(run: &Path, done: u64) -> Result<Option<String>, RunFolderError> {
    #[derive(Deserialize)]
    struct OfStep {
        step: u64,
    }
    let path = run.join(FINGERPRINTS);
    let file = match open_regular_with(&path, File::options().read(true).write(true)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(write_error(&path))?,
    };
    let (mut lines, mut line, mut kept) = (BufReader::new(&file), Vec::new(), 0);
    let what = loop {
        line.clear();
        lines.by_ref().take(LARGEST).read_until(b'\n', &mut line).map_err(write_error(&path))?;
        if line.is_empty() {
            return Ok(None);
        }
        match serde_json::from_slice(&line) {
            Ok(OfStep { step }) if line.ends_with(b"\n") && step > done => {
                break format!("the fingerprints of steps after {done}");
            }
            Ok(_) if line.ends_with(b"\n") => kept += line.len() as u64,
            _ => break "the fingerprints from a broken line on".to_owned(),
        }
    };
    let aside = free_name(&run.join("fingerprints"), ".jsonl");
    let moved = File::create_new(&aside).and_then(|mut moved| {
        lines.seek(SeekFrom::Start(kept))?;
        io::copy(&mut lines, &mut moved)?;
        moved.sync_all()
    });
    moved.map_err(write_error(&aside))?;
    file.set_len(kept).map_err(write_error(&path))?;
    Ok(Some(format!("moved {what} to {}", aside.display())))
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

/// Creates a folder inside a run's folder, unless it exists. The run's folder itself is never created here.
pub(super) fn create_in_run(folder: &Path) -> Result<(), RunFolderError> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(write_error(folder)(error)),
        _ => Ok(()),
    }
}
