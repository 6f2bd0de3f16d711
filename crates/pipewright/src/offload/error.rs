//! The errors of tensors that leave memory or come back.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use pipewright_schedule::{Microbatch, StageIndex};

/// The tensors of a forward could not be moved.
#[derive(thiserror::Error)]
#[error("the inputs that stage {stage} keeps of microbatch {microbatch} {kind}")]
pub struct OffloadError {
    /// The stage that keeps them.
    pub stage: StageIndex,
    /// The microbatch that they belong to.
    pub microbatch: Microbatch,
    /// The failure.
    #[source]
    pub kind: OffloadErrorKind,
}

pipewright_schedule::message_as_debug!(OffloadError);

/// The failure of a transfer.
#[derive(thiserror::Error)]
pub enum OffloadErrorKind {
    /// A file could not be made or written.
    #[error(
        "cannot be written to `{}`: {source}; free space there, choose another folder (`offload_folder`), or keep more \
         microbatches in memory", .file.display()
    )]
    Write {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file could not be read.
    #[error("cannot be read from `{}`: {source}", .file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The thread that moves tensors could not start.
    #[error("cannot leave memory: the thread that moves them cannot start: {source}")]
    Thread {
        /// The system's error.
        source: io::Error,
    },
    /// The thread that moves tensors has panicked.
    #[error("are lost: the thread that moves them panicked: {message}")]
    Panicked {
        /// The message of the panic.
        message: String,
    },
    /// The tensors did not come back in time.
    #[error("have not come back after {:.1} s: the disk is too slow, or the deadline too short", .waited.as_secs_f64())]
    Deadline {
        /// The deadline.
        waited: Duration,
    },
}

pipewright_schedule::message_as_debug!(OffloadErrorKind);
