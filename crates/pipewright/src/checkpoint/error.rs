//! The errors of writing and reading checkpoints. Each names the folder, file or parameter.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pipewright_system::private_folder::PrivateFolderError;
use thiserror::Error;

use super::finite::NotFinite;
use crate::ids::WorldRank;

/// Why a checkpoint cannot be written, read or restored.
#[derive(Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The system reported an error.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The action that failed, as in "cannot write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Another user could have made the folder of copies, or could change it.
    #[error(transparent)]
    NotPrivate(PrivateFolderError),
    /// Another process owns the folder.
    #[error(
        "{}: process {} is at work in this folder; wait until it has ended",
        path.display(), owner.as_deref().unwrap_or("of unknown id")
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// The owner's process id, if it can be read.
        owner: Option<String>,
    },
    /// The folder was moved or removed while this process wrote to it.
    #[error(
        "{}: the folder was moved or removed while this process wrote to it: nothing more is written here; start again, and \
         leave the folder in its place",
        path.display()
    )]
    FolderGone {
        /// The folder.
        path: PathBuf,
    },
    /// Another folder has taken the place of the one that this process wrote to.
    #[error(
        "{}: this is not the folder any more that this process wrote to: its lock file was removed, or another folder was put \
         in its place; nothing more is written here; start again, and leave the folder in its place",
        path.display()
    )]
    FolderReplaced {
        /// The folder.
        path: PathBuf,
    },
    /// A parameter has elements that are not finite, so the checkpoint is not written.
    #[error(
        "{}: the checkpoint of step {step} is not written, because after this step the parameter `{parameter}` has {found}; \
         lower the learning rate or the weight decay, or clip gradients",
        path.display()
    )]
    NotFinite {
        /// The folder of the checkpoints.
        path: PathBuf,
        /// The steps taken.
        step: u64,
        /// The parameter's global path.
        parameter: Arc<str>,
        /// The elements that are not finite.
        found: NotFinite,
    },
    /// A folder of checkpoints has no complete checkpoint.
    #[error("{}: there is no complete checkpoint in this folder", path.display())]
    NoneComplete {
        /// The folder.
        path: PathBuf,
    },
    /// The disk accepts no data.
    #[error(
        "{}: nothing of the checkpoint has been written for {:.0} s; check the disk",
        path.display(), waited.as_secs_f64()
    )]
    Stuck {
        /// The folder of the checkpoints.
        path: PathBuf,
        /// The time without progress.
        waited: Duration,
    },
    /// The run has failed while a copy was sent.
    #[error("the run has failed before rank {rank} had a part of a copy")]
    CopyAbandoned {
        /// The rank of the process that would have held it.
        rank: WorldRank,
    },
    /// The process that commits does not answer, or the run has failed before its answer.
    #[error("{0}")]
    Unanswered(String),
    /// The copies of this process are in its own machine's memory only.
    #[error(transparent)]
    NotSent {
        /// Why the other machine has no further copy.
        source: Box<CheckpointError>,
    },
    /// A checkpoint, a file of it or its folder cannot be used.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// The file or folder.
        path: PathBuf,
        /// The reason, and what to do.
        reason: String,
    },
    /// The state cannot be stored, or a copy of it cannot be sent.
    #[error("{0}")]
    Refused(String),
}

pipewright_schedule::message_as_debug!(CheckpointError);

impl CheckpointError {
    /// Returns a function for `map_err` that adds the action and the path to the system's reason.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    /// Makes the error of a file or folder that cannot be used.
    pub(super) fn unusable(path: &Path, reason: impl Into<String>) -> Self {
        Self::Unusable { path: path.to_owned(), reason: reason.into() }
    }

    /// Makes the error of a damaged file or folder of a checkpoint.
    pub(super) fn damaged(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::unusable(
            path,
            format!("{reason}; delete the checkpoint's folder to resume from the previous one"),
        )
    }
}
