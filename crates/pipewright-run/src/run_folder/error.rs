//! The reasons why results cannot be written.

use std::io;
use std::path::{Path, PathBuf};

use pipewright::checkpoint::CheckpointError;
use pipewright_schedule::words::counted;
use pipewright_system::failure::disk_advice;
use thiserror::Error;

/// The reason why results cannot be written.
#[derive(Error)]
pub enum RunFolderError {
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
    /// The folder, or what is in it, is not what a run needs.
    #[error("{}: {reason}", path.display())]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// The reason, and what to do.
        reason: String,
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

pipewright_schedule::message_as_debug!(RunFolderError);

impl RunFolderError {
    /// Returns whether the run's folder was moved, removed or replaced during the run.
    pub fn is_lost_folder(&self) -> bool {
        matches!(self, Self::Checkpoints(error) if is_lost_folder(error))
    }

    /// Returns whether another process writes to the folder.
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::InUse { .. } | Self::Checkpoints(CheckpointError::Locked { .. }))
    }

    /// Returns the message without the advice to choose another folder, for a run that continues.
    pub fn reason(&self) -> String {
        match self {
            Self::Write { path, source } => format!("{}: {source}", path.display()),
            other => other.to_string(),
        }
    }
}

/// Returns words that name the first few files.
pub(super) fn listed(names: &[String]) -> String {
    const MOST: usize = 3;
    let quoted = |name: &String| format!("`{name}`");
    let mut words: Vec<String> = names.iter().take(MOST).map(quoted).collect();
    words.extend(names.len().checked_sub(MOST + 1).map(|others| counted(others + 1, "other path")));
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, first)) => format!("{} and {last}", first.join(", ")),
        None => String::new(),
    }
}

/// Returns whether a run's folder was moved, removed or replaced during the run.
pub fn is_lost_folder(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::FolderGone { .. } | CheckpointError::FolderReplaced { .. })
}

/// Returns the refusal of a file or folder.
pub(super) fn refused(path: &Path, reason: impl Into<String>) -> RunFolderError {
    RunFolderError::Refused { path: path.to_owned(), reason: reason.into() }
}

/// Returns a function for `map_err` that adds the path to a failed write.
pub(super) fn write_error(path: &Path) -> impl FnOnce(io::Error) -> RunFolderError {
    move |source| RunFolderError::Write { path: path.to_owned(), source }
}

/// Returns a function for `map_err` that adds the path to a failed move.
pub(super) fn move_error(path: &Path) -> impl FnOnce(io::Error) -> RunFolderError {
    move |source| RunFolderError::MoveAside { path: path.to_owned(), source }
}
