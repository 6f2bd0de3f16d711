//! What can be wrong with a checkpoint, or keeps one from being written: always with the folder, file or parameter.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

/// Why a checkpoint cannot be written, read or taken over.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The system refuses.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// What was tried, as in "cannot write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Another process has the folder.
    #[error("{}: process {} is at work in this folder; wait until it has ended", path.display(), owner.as_deref().unwrap_or("of unknown id"))]
    Locked {
        /// The folder.
        path: PathBuf,
        /// The owner's process id, as far as it can be read.
        owner: Option<String>,
    },
    /// No complete checkpoint in a folder of checkpoints.
    #[error("{}: there is no complete checkpoint in this folder", path.display())]
    NoneComplete {
        /// The folder.
        path: PathBuf,
    },
    /// The folder is no checkpoint, or one without its manifest.
    #[error("{}: the manifest is missing: this is no complete checkpoint; use another", path.display())]
    NoManifest {
        /// The manifest that is not there.
        path: PathBuf,
    },
    /// The manifest is not what was written.
    #[error("{}: the manifest is damaged: {reason}; delete the checkpoint's folder to go on from the one before", path.display())]
    DamagedManifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor that is spread over shards, and not all of it.
    #[error("{}: the parts of `{tensor}` do not make up a whole; delete the folder to go on from the one before", path.display())]
    Torn {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A manifest of a later version of this crate.
    #[error("{}: the checkpoint has format {found}, and this program reads up to {known}; use a later version", path.display())]
    TooNew {
        /// The manifest.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The newest format that is known.
        known: u32,
    },
    /// A file that the manifest names is not there.
    #[error("{}: the shard is missing; delete the checkpoint's folder to go on from the one before", path.display())]
    MissingShard {
        /// The file.
        path: PathBuf,
    },
    /// A file of another length than was written.
    #[error("{}: the shard has {found} bytes of {expected}; delete the checkpoint's folder to go on from the one before", path.display())]
    ShardLength {
        /// The file.
        path: PathBuf,
        /// Bytes that were written.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// A file of another checkpoint.
    #[error("{}: the shard is of step {found}, the checkpoint of step {expected}; put the right file back", path.display())]
    ForeignShard {
        /// The file.
        path: PathBuf,
        /// The checkpoint's step.
        expected: u64,
        /// The step that the file says.
        found: u64,
    },
    /// A file with other content than was written.
    #[error("{}: the shard is damaged: its content has another hash than was written; delete the checkpoint's folder to go on from the one before", path.display())]
    DamagedShard {
        /// The file.
        path: PathBuf,
    },
    /// A parameter that the checkpoint does not have.
    #[error("{}: the checkpoint has no parameter `{parameter}`; resume with the model that it was made of", path.display())]
    MissingParameter {
        /// The checkpoint.
        path: PathBuf,
        /// The parameter's global path.
        parameter: Arc<str>,
    },
    /// A parameter of another shape or element type.
    #[error("{}: `{parameter}` is {found} in the checkpoint and {expected} in the model; resume with the model that it was made of", path.display())]
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
    /// State that the optimizer does not take.
    #[error("{}: the optimizer does not take the state that is stored for it: {reason}; resume with the optimizer that wrote it", path.display())]
    Optimizer {
        /// The checkpoint.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// A parameter whose name means something else in a shard.
    #[error(
        "the parameter `{parameter}` has an @ in its path, which sets optimizer state apart: give it another path"
    )]
    Path {
        /// The parameter's global path.
        parameter: Arc<str>,
    },
    /// Two parameters of one path.
    #[error(
        "two parameters have the path `{parameter}`, and a checkpoint holds one of each path: give different parameters \
         different paths (`StageModule::parameter_path`, or `Stage::with_prefix`)"
    )]
    EqualPaths {
        /// Their global path.
        parameter: Arc<str>,
    },
    /// Two tensors of one name that differ, in two files.
    #[error(
        "{}: `{tensor}` differs between {} and {}: two parameters had this path when the checkpoint was written, and it \
         does not say which is whose; train again with a path of its own for each parameter \
         (`StageModule::parameter_path`, or `Stage::with_prefix`)", path.display(), .shards.0, .shards.1
    )]
    Ambiguous {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The files.
        shards: (String, String),
    },
    /// A tensor that the format cannot hold.
    #[error("`{tensor}` has elements of type {dtype}, which a checkpoint cannot hold")]
    ElementType {
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: String,
    },
    /// Optimizer state that cannot be taken apart.
    #[error("the optimizer's state cannot be read: {reason}")]
    Record {
        /// What Burn says.
        reason: String,
    },
    /// Other processes have not written their part.
    #[error(
        "{}: the shards of ranks {ranks:?} are not there, and nothing has moved for {:.0} s: every process of the run must \
         see this folder", path.display(), waited.as_secs_f64()
    )]
    SilentRanks {
        /// The folder of the checkpoints.
        path: PathBuf,
        /// The ranks.
        ranks: Vec<u32>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The disk takes nothing.
    #[error("{}: nothing of the checkpoint has been written for {:.0} s; see whether the disk is well", path.display(), waited.as_secs_f64())]
    Stuck {
        /// The folder of the checkpoints.
        path: PathBuf,
        /// How long nothing moved.
        waited: Duration,
    },
    /// The writing thread is gone.
    #[error("{}: the thread that writes checkpoints has ended early", path.display())]
    WriterGone {
        /// The folder of the checkpoints.
        path: PathBuf,
    },
}

impl CheckpointError {
    /// For `map_err`: the system's reason, with what was tried on which path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
