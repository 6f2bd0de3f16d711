//! The reasons why results cannot be written.

use std::io;
use std::path::{Path, PathBuf};

use pipewright::checkpoint::CheckpointError;
use pipewright::train::CONFIG_FILE;
use thiserror::Error;

use crate::failure::disk_advice;

/// The reason why results cannot be written.
#[derive(Debug, Error)]
pub(crate) enum RunFolderError {
    /// The folder or a file in it cannot be written.
    #[error(
        "{}: cannot be written: {source}; {}", path.display(), disk_advice(source).unwrap_or("choose another run.out")
    )]
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
    #[error("{}: there is no run to resume in this folder: {CONFIG_FILE} is missing; train first", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// Another process writes the metrics.
    #[error("{}: another process writes to this folder: wait until it has ended, or choose another run.out", path.display())]
    InUse {
        /// The file that the other process writes.
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

    /// Returns the message without the advice to choose another folder, for a run that continues.
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

/// Returns a function for `map_err` that adds the path to a failed write.
pub(super) fn write_error(path: &Path) -> impl FnOnce(io::Error) -> RunFolderError {
    move |source| RunFolderError::Write { path: path.to_owned(), source }
}

/// Returns a function for `map_err` that adds the path to a failed move.
pub(super) fn move_error(path: &Path) -> impl FnOnce(io::Error) -> RunFolderError {
    move |source| RunFolderError::MoveAside { path: path.to_owned(), source }
}
