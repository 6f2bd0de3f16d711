//! The folder of a run's results: `metrics.jsonl`, `config.toml`, `timeline.json`, and its checkpoints.
//!
//! An earlier run in the folder is moved aside, to the same name with `.1`, `.2` and so on behind it: nothing is lost,
//! the same command works again, and whoever reads the folder finds the newest run. Files of the same names that belong
//! to no run are not touched; the run is refused. The folder of the checkpoints is locked as long as a run is at work:
//! two never write to one folder.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use pipewright::checkpoint::{CheckpointError, CheckpointFolder};
use pipewright::trainer::Metrics;
use thiserror::Error;

/// A line of figures for each step.
pub(crate) const METRICS: &str = "metrics.jsonl";
/// The folder of the checkpoints.
const CHECKPOINTS: &str = "checkpoints";
const CONFIG: &str = "config.toml";
const TIMELINE: &str = "timeline.json";

/// A run's folder, ready to be written to.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    metrics: File,
    moved_aside: Option<PathBuf>,
    /// Until somebody else writes checkpoints.
    checkpoints: Option<CheckpointFolder>,
}

/// Why results cannot be kept.
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
    /// Something that is no folder has the folder's name.
    #[error("{}: this is no folder; choose another run.out", path.display())]
    NoFolder {
        /// What has the name.
        path: PathBuf,
    },
    /// A file that a run would write is there, and no run's.
    #[error("{}: the file belongs to no earlier run and would be overwritten; choose another run.out", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// There is nothing to go on with.
    #[error("{}: there is no run to go on with in this folder: {CONFIG} is missing; train first", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// The folder of the checkpoints cannot be had.
    #[error(transparent)]
    Checkpoints(#[from] CheckpointError),
    /// The earlier run cannot be moved.
    #[error("{}: the earlier run there cannot be moved aside: {source}; choose another run.out", path.display())]
    MoveAside {
        /// The folder.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

/// Checks that a run could be kept in `path`, and leaves no trace.
///
/// # Errors
/// As [`RunFolder::create`].
pub(crate) fn probe(path: &Path) -> Result<(), RunFolderError> {
    refuse_foreign_files(path)?;
    // The nearest folder that exists is the one that the run's folder, or its first missing ancestor, is made in.
    let existing = path.ancestors().find(|folder| fs::symlink_metadata(folder).is_ok());
    let Some(existing) = existing else { return Ok(()) };
    if !existing.is_dir() {
        return Err(RunFolderError::NoFolder { path: existing.to_owned() });
    }
    let trial = existing.join(format!(".pipewright-{}", std::process::id()));
    let tried = File::create_new(&trial).and_then(|_| fs::remove_file(&trial));
    tried.map_err(|source| RunFolderError::Write { path: path.to_owned(), source })
}

impl RunFolder {
    /// Makes the folder, moves an earlier run aside, and writes `config`, the effective configuration.
    ///
    /// # Errors
    /// When the folder cannot be written, holds files that a run would overwrite, or cannot be moved.
    pub(crate) fn create(path: &Path, config: &str) -> Result<Self, RunFolderError> {
        refuse_foreign_files(path)?;
        let moved_aside = if is_run(path) { Some(move_aside(path)?) } else { None };
        fs::create_dir_all(path).map_err(write_error(path))?;
        let checkpoints = Some(own_checkpoints(path)?);
        let metrics_path = path.join(METRICS);
        let metrics = File::create_new(&metrics_path).map_err(write_error(&metrics_path))?;
        write_config(path, config)?;
        Ok(Self { path: path.to_owned(), metrics, moved_aside, checkpoints })
    }

    /// Goes on with the run in the folder: steps after `done` are cut off its metrics, and `config` takes the place of
    /// its configuration.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn reopen(
        path: &Path,
        config: &str,
        done: u64,
        checkpoints: CheckpointFolder,
    ) -> Result<Self, RunFolderError> {
        let metrics_path = path.join(METRICS);
        let cut = || {
            let text = match fs::read(&metrics_path) {
                // A torn character can only stand in a torn last line.
                Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
                Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
                Err(error) => return Err(error),
            };
            let metrics = File::options().append(true).create(true).open(&metrics_path)?;
            metrics.set_len(lines_to(&text, done) as u64)?;
            Ok(metrics)
        };
        let metrics = cut().map_err(write_error(&metrics_path))?;
        write_config(path, config)?;
        Ok(Self { path: path.to_owned(), metrics, moved_aside: None, checkpoints: Some(checkpoints) })
    }

    /// The folder of the checkpoints, for whoever writes them; it can be taken once.
    pub(crate) fn take_checkpoints(&mut self) -> CheckpointFolder {
        self.checkpoints.take().expect("one writer of checkpoints a run")
    }

    /// Where the earlier run is, when there was one.
    pub(crate) fn moved_aside(&self) -> Option<&Path> {
        self.moved_aside.as_deref()
    }

    /// Appends a step's figures as one line, so that whoever follows the file sees it at once.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_metrics(&mut self, metrics: &Metrics) -> Result<(), RunFolderError> {
        let mut line = serde_json::to_string(metrics).expect("figures can be written as JSON");
        line.push('\n');
        let written = self.metrics.write_all(line.as_bytes()).and_then(|()| self.metrics.flush());
        written.map_err(write_error(&self.path.join(METRICS)))
    }

    /// Writes the last step's measured timeline.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_timeline(&self, trace: &str) -> Result<(), RunFolderError> {
        let path = self.path.join(TIMELINE);
        fs::write(&path, trace).map_err(write_error(&path))
    }
}

/// The configuration of the run in a folder.
///
/// # Errors
/// When there is none.
pub(crate) fn config_of(run: &Path) -> Result<PathBuf, RunFolderError> {
    let config = run.join(CONFIG);
    if config.is_file() { Ok(config) } else { Err(RunFolderError::NoRun { path: run.to_owned() }) }
}

/// Where the checkpoints of the run in a folder are.
pub(crate) fn checkpoints_of(run: &Path) -> PathBuf {
    run.join(CHECKPOINTS)
}

/// Takes a run's folder for this process.
///
/// # Errors
/// When another process has it, or the system refuses.
pub(crate) fn own_checkpoints(run: &Path) -> Result<CheckpointFolder, RunFolderError> {
    Ok(CheckpointFolder::own(&checkpoints_of(run))?)
}

/// The length of the lines of metrics up to that of step `done`. The first line that is torn or of a later step ends
/// them.
pub(crate) fn lines_to(metrics: &str, done: u64) -> usize {
    let is_kept = |line: &str| {
        let figures = serde_json::from_str::<serde_json::Value>(line).ok();
        let step = figures.and_then(|figures| figures.get("step")?.as_u64());
        line.ends_with('\n') && step.is_some_and(|step| step <= done)
    };
    metrics.split_inclusive('\n').take_while(|line| is_kept(line)).map(str::len).sum()
}

/// Replaces the configuration at once, so that a run that is killed meanwhile has the one or the other.
fn write_config(run: &Path, config: &str) -> Result<(), RunFolderError> {
    let (path, scratch) = (run.join(CONFIG), run.join(format!(".{CONFIG}")));
    let written = File::create(&scratch).and_then(|mut file| {
        file.write_all(config.as_bytes())?;
        file.sync_all()?;
        fs::rename(&scratch, &path)
    });
    written.map_err(write_error(&path))
}

/// For `map_err`: the system's reason, with the path.
fn write_error(path: &Path) -> impl FnOnce(io::Error) -> RunFolderError {
    move |source| RunFolderError::Write { path: path.to_owned(), source }
}

/// Whether the folder holds a run. Its metrics are the first thing that a run writes.
fn is_run(path: &Path) -> bool {
    path.join(METRICS).exists()
}

fn refuse_foreign_files(path: &Path) -> Result<(), RunFolderError> {
    let foreign = [CONFIG, TIMELINE].map(|name| path.join(name)).into_iter().find(|file| file.exists());
    match foreign {
        Some(file) if !is_run(path) => Err(RunFolderError::Foreign { path: file }),
        _ => Ok(()),
    }
}

/// Renames the folder to the first of its numbered names that is free, unless a run is still at work in it.
fn move_aside(path: &Path) -> Result<PathBuf, RunFolderError> {
    drop(own_checkpoints(path)?);
    let numbered = |number: u64| {
        let mut name = OsString::from(path);
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let aside = (1..).map(numbered).find(|aside| fs::symlink_metadata(aside).is_err());
    let aside = aside.expect("there are more numbers than folders");
    match fs::rename(path, &aside) {
        Ok(()) => Ok(aside),
        Err(source) => Err(RunFolderError::MoveAside { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(step: u64) -> Metrics {
        Metrics {
            step,
            loss: 2.5,
            grad_norm: 1.0,
            learning_rate: 1e-3,
            tokens_per_second: 10.0,
            step_ms: 20.0,
            elapsed_s: 1.5,
            tokens: 64,
            epoch: 0.25,
            bubble_fraction: 0.125,
            peak_bytes: vec![3, 4],
            ..Metrics::default()
        }
    }

    #[test]
    fn a_line_a_step_with_the_documented_keys() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let path = scratch.path().join("a/b");
        let mut folder = RunFolder::create(&path, "[run]\n").expect("the scratch folder takes files");
        folder.write_metrics(&metrics(1)).expect("it takes lines");
        let line = "{\"step\":1,\"loss\":2.5,\"grad_norm\":1.0,\"learning_rate\":0.001,\"tokens_per_second\":10.0,\
                    \"step_ms\":20.0,\"elapsed_s\":1.5,\"tokens\":64,\
                    \"epoch\":0.25,\"bubble_fraction\":0.125,\"exposed_comm_fraction\":0.0,\"peak_bytes\":[3,4]}\n";
        assert_eq!(fs::read_to_string(path.join(METRICS)).ok().as_deref(), Some(line), "readable at once");
        assert_eq!(fs::read_to_string(path.join(CONFIG)).ok().as_deref(), Some("[run]\n"));
    }

    #[test]
    fn earlier_runs_are_moved_aside() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let path = scratch.path().join("a");
        for run in 0..3 {
            let mut folder = RunFolder::create(&path, "").expect("the scratch folder takes files");
            folder.write_metrics(&metrics(run)).expect("it takes lines");
        }
        let step = |name: &str| {
            let line = fs::read_to_string(scratch.path().join(name).join(METRICS)).expect(name);
            line.chars().nth(8).expect("the step")
        };
        assert_eq!([step("a.1"), step("a.2"), step("a")], ['0', '1', '2']);
    }

    #[test]
    fn metrics_are_cut_back_to_the_step() {
        let check = |text: &str, done: u64, kept: usize| {
            assert_eq!(
                &text[..lines_to(text, done)],
                text.split_inclusive('\n').take(kept).collect::<String>()
            );
        };
        let whole = "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n";
        check(whole, 3, 3);
        check(whole, 2, 2);
        check(whole, 0, 0);
        check("{\"step\":1}\n{\"step\":2}", 2, 1);
        check("{\"step\":1}\n{\"st\n{\"step\":3}\n", 3, 1);
        check("", 3, 0);
    }

    #[test]
    fn a_reopened_run_goes_on_behind_its_checkpoint() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let path = scratch.path().join("a");
        let mut folder = RunFolder::create(&path, "old").expect("the scratch folder takes files");
        (1..=3).for_each(|step| folder.write_metrics(&metrics(step)).expect("it takes lines"));
        drop(folder);
        let checkpoints = own_checkpoints(&path).expect("nobody else has it");
        let mut folder = RunFolder::reopen(&path, "new", 1, checkpoints).expect("the folder takes files");
        folder.write_metrics(&metrics(2)).expect("it takes lines");
        let text = fs::read_to_string(path.join(METRICS)).expect("metrics");
        let steps: Vec<&str> = text.lines().map(|line| &line[..9]).collect();
        assert_eq!(steps, ["{\"step\":1", "{\"step\":2"]);
        assert_eq!(fs::read_to_string(path.join(CONFIG)).ok().as_deref(), Some("new"));
    }

    #[test]
    fn files_of_no_run_are_kept() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        fs::write(scratch.path().join(CONFIG), "mine").expect("a file");
        for result in [RunFolder::create(scratch.path(), "").map(drop), probe(scratch.path())] {
            assert!(matches!(result, Err(RunFolderError::Foreign { .. })), "{result:?}");
        }
        assert_eq!(fs::read_to_string(scratch.path().join(CONFIG)).ok().as_deref(), Some("mine"));
    }

    #[test]
    fn a_probe_leaves_no_trace() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        probe(&scratch.path().join("a/b")).expect("it could be made");
        assert_eq!(fs::read_dir(scratch.path()).expect("a folder").count(), 0);
        fs::write(scratch.path().join("c"), "").expect("a file");
        let found = probe(&scratch.path().join("c/d"));
        assert!(matches!(found, Err(RunFolderError::NoFolder { .. })), "{found:?}");
    }
}
