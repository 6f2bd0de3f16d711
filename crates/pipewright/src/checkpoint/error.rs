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
    /// This process does not find the folder that another process writes to.
    #[error(
        "{}: this process has not found the folder of the checkpoints within {:.1} s: every process of the run must see this \
         folder; use a shared file system",
        path.display(), waited.as_secs_f64()
    )]
    NotSeen {
        /// The folder.
        path: PathBuf,
        /// The time of the search.
        waited: Duration,
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
    /// The folder is not a checkpoint, or its manifest is missing.
    #[error("{}: the manifest is missing: this is not a complete checkpoint; use another", path.display())]
    NoManifest {
        /// The path of the missing manifest.
        path: PathBuf,
    },
    /// The manifest differs from the one that was written.
    #[error(
        "{}: the manifest is damaged: {reason}; delete the checkpoint's folder to resume from the previous \
         one",
        path.display()
    )]
    DamagedManifest {
        /// The manifest.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// Parts of a tensor are missing.
    #[error(
        "{}: the parts of `{tensor}` do not make up the whole tensor; delete the folder to resume from the \
         previous one",
        path.display()
    )]
    Torn {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A later version of this crate wrote the manifest.
    #[error(
        "{}: the checkpoint has format {found}, and this program reads up to {known}; use a later version",
        path.display()
    )]
    TooNew {
        /// The manifest.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The newest format that this version reads.
        known: u32,
    },
    /// A file that the manifest names does not exist.
    #[error(
        "{}: the file is missing; delete the checkpoint's folder to resume from the previous one",
        path.display()
    )]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file has another length than the one that was written.
    #[error(
        "{}: the file has {found} bytes of {expected}; delete the checkpoint's folder to resume from the \
         previous one",
        path.display()
    )]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Bytes that were written.
        expected: u64,
        /// The number of bytes of the file.
        found: u64,
    },
    /// A file belongs to another checkpoint.
    #[error(
        "{}: the file is of step {found}, the checkpoint of step {expected}; put the right file back",
        path.display()
    )]
    ForeignFile {
        /// The file.
        path: PathBuf,
        /// The checkpoint's step.
        expected: u64,
        /// The step in the file's header.
        found: u64,
    },
    /// A file has other content than the one that was written.
    #[error(
        "{}: the file is damaged: its content has another hash than was written; delete the checkpoint's \
         folder to resume from the previous one",
        path.display()
    )]
    DamagedFile {
        /// The file.
        path: PathBuf,
    },
    /// The checkpoint does not have a parameter.
    #[error(
        "{}: the checkpoint has no parameter `{parameter}`; resume with the model that wrote it",
        path.display()
    )]
    MissingParameter {
        /// The checkpoint.
        path: PathBuf,
        /// The parameter's global path.
        parameter: Arc<str>,
    },
    /// A parameter has another shape or element type.
    #[error(
        "{}: `{parameter}` is {found} in the checkpoint and {expected} in the model; resume with the model \
         that wrote it",
        path.display()
    )]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// The parameter's global path.
        parameter: Arc<str>,
        /// Element type and shape in the model.
        expected: String,
        /// Element type and shape in the checkpoint.
        found: String,
    },
    /// The optimizer does not accept the stored state.
    #[error(
        "{}: the optimizer does not take the state that is stored for it: {reason}; resume with the \
         optimizer that wrote it",
        path.display()
    )]
    Optimizer {
        /// The checkpoint.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A parameter's path has a character that separates optimizer state in a file.
    #[error(
        "the parameter `{parameter}` has an @ in its path, which separates optimizer state: give it another path"
    )]
    Path {
        /// The parameter's global path.
        parameter: Arc<str>,
    },
    /// Two parameters have the same path.
    #[error(
        "two parameters have the path `{parameter}`, and a checkpoint holds one of each path: give different parameters \
         different paths (`StageModule::parameter_path`, or `Stage::with_prefix`)"
    )]
    EqualPaths {
        /// Their global path.
        parameter: Arc<str>,
    },
    /// Two files have tensors of the same name that differ.
    #[error(
        "{}: `{tensor}` differs between {} and {}: two parameters had this path when the checkpoint was written, and it \
         does not say which tensor belongs to which parameter; train again with a different path for each parameter \
         (`StageModule::parameter_path`, or `Stage::with_prefix`)", path.display(), .files.0, .files.1
    )]
    Ambiguous {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The files.
        files: (String, String),
    },
    /// The format cannot hold a tensor.
    #[error("`{tensor}` has elements of type {dtype}, which a checkpoint cannot hold")]
    ElementType {
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: String,
    },
    /// The optimizer's state cannot be read.
    #[error("the optimizer's state cannot be read: {reason}")]
    Record {
        /// Burn's reason.
        reason: String,
    },
    /// Other processes have not written their parts.
    #[error(
        "{}: the files of ranks {ranks:?} are missing, and nothing has moved for {:.0} s: every process of the run must \
         see this folder", path.display(), waited.as_secs_f64()
    )]
    SilentRanks {
        /// The folder of the checkpoints.
        path: PathBuf,
        /// The ranks.
        ranks: Vec<u32>,
        /// The time without a further part.
        waited: Duration,
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
    /// Another process does not confirm what it gets of a copy.
    #[error("rank {rank} has confirmed nothing of a copy for {:.1} s", waited.as_secs_f64())]
    SilentHolder {
        /// The rank of the process.
        rank: WorldRank,
        /// The deadline.
        waited: Duration,
    },
    /// Another process cannot hold a part of a copy.
    #[error("rank {rank} cannot hold a part of a copy: {reason}")]
    CopyRefused {
        /// The rank of the process.
        rank: WorldRank,
        /// Its reason.
        reason: String,
    },
    /// The run has failed while a copy was sent.
    #[error("the run has failed before rank {rank} had a part of a copy")]
    CopyAbandoned {
        /// The rank of the process that would have held it.
        rank: WorldRank,
    },
    /// The copies of this process are in its own machine's memory only.
    #[error(transparent)]
    NotSent {
        /// Why the other machine has no further copy.
        source: Box<CheckpointError>,
    },
    /// Another process does not have all of a copy in time.
    #[error("the transfer of a copy to rank {rank} takes too long")]
    SlowTransfer {
        /// The rank of the process.
        rank: WorldRank,
    },
    /// The thread that receives copies has ended.
    #[error("{}: the thread that receives copies has ended early", path.display())]
    ReceiverGone {
        /// The folder of the copies.
        path: PathBuf,
    },
    /// The writing thread has ended.
    #[error("{}: the thread that writes checkpoints has ended early", path.display())]
    WriterGone {
        /// The folder of the checkpoints.
        path: PathBuf,
    },
}

pipewright_schedule::message_as_debug!(CheckpointError);

impl CheckpointError {
    /// Returns a function for `map_err` that adds the action and the path to the system's reason.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
