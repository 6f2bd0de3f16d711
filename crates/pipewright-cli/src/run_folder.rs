//! The folder of a run's results: `metrics.jsonl`, `config.toml`, `timeline.json`.
//!
//! An earlier run in the folder is moved aside, to the same name with `.1`, `.2` and so on behind it: nothing is lost, the
//! same command works again, and whoever reads the folder finds the newest run. Files of the same names that belong to no
//! run are not touched; the run is refused.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use pipewright::trainer::Metrics;
use thiserror::Error;

const METRICS: &str = "metrics.jsonl";
const CONFIG: &str = "config.toml";
const TIMELINE: &str = "timeline.json";

/// A run's folder, ready to be written to.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    metrics: File,
    moved_aside: Option<PathBuf>,
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
        let written = |path: &Path, result: io::Result<()>| {
            result.map_err(|source| RunFolderError::Write { path: path.to_owned(), source })
        };
        written(path, fs::create_dir_all(path))?;
        let metrics_path = path.join(METRICS);
        let metrics = File::create_new(&metrics_path)
            .map_err(|source| RunFolderError::Write { path: metrics_path, source })?;
        written(&path.join(CONFIG), fs::write(path.join(CONFIG), config))?;
        Ok(Self { path: path.to_owned(), metrics, moved_aside })
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
        written.map_err(|source| RunFolderError::Write { path: self.path.join(METRICS), source })
    }

    /// Writes the last step's measured timeline.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_timeline(&self, trace: &str) -> Result<(), RunFolderError> {
        let path = self.path.join(TIMELINE);
        fs::write(&path, trace).map_err(|source| RunFolderError::Write { path, source })
    }
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

/// Renames the folder to the first of its numbered names that is free.
fn move_aside(path: &Path) -> Result<PathBuf, RunFolderError> {
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
                    \"step_ms\":20.0,\"bubble_fraction\":0.125,\"exposed_comm_fraction\":0.0,\"peak_bytes\":[3,4]}\n";
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
